#ifndef FERRY_CUDA_SYNC_CHUNKS_CUH
#define FERRY_CUDA_SYNC_CHUNKS_CUH

/// Progress of many warps, told to the peers part by part. Warps finish their share of a chunk in any order; the last
/// one tells the peers. Chunks are told in ascending order, because a flag may never go back.
///
///   local.chunk_arrivals[c]  all sending warps   atom.add.acq_rel.gpu        what the warp wrote to the peers; also
///                                                ld.acquire.gpu by the last warp of c - 1: are all there?
///   local.num_chunks_sent    last warp of c      st.release.gpu / ld.acquire.gpu   progress of chunk c was stored,
///                                                                            or a later chunk's is about to be

#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// progress[] word: rows told so far in this epoch.
__device__ inline std::uint64_t progress_value(std::uint64_t epoch, std::int64_t rows) {
  return epoch << 32 | static_cast<std::uint64_t>(rows);
}

struct ChunkPlan {
  int num_warps = 1;  ///< that report, over all blocks
  int num_chunks = 1;
};

/// One warp's part. `rows_after(chunk, rank)` says how many rows for `rank` are there once `chunk` is.
template <typename RowsAfter>
class ChunkReporter {
 public:
  /// `posts_done`: the last chunk also ends this rank's part in the call.
  __device__ ChunkReporter(const CrewParams& crew, const ChunkPlan& plan, std::uint64_t epoch, RowsAfter rows_after,
                           bool posts_done)
      : crew_(crew), plan_(plan), epoch_(epoch), rows_after_(rows_after), posts_done_(posts_done) {}

  /// This warp's writes for all chunks before `end` are complete (every lane's own, bulk ones included). All lanes.
  __device__ void report_before(int end) {
    for (; next_ < end; ++next_) report(next_);
  }

  /// The first chunk that this warp has not reported.
  __device__ int next() const { return next_; }

 private:
  __device__ void report(int chunk) {
    LocalState& local = *crew_.control.local;
    fence_async_proxy();
    __syncwarp();
    unsigned last = 0;
    if (lane_idx() == 0) {
      last = add_acq_rel_device(&local.chunk_arrivals[chunk], 1) + 1 == static_cast<std::uint32_t>(plan_.num_warps);
    }
    last = __shfl_sync(0xFFFFFFFFU, last, 0);
    __syncwarp();  // hands what lane 0 has acquired to those that tell the peers
    if (last == 0) return;
    // All that takes long before its turn: turns follow each other, so whatever one takes bounds the pace of chunks.
    const std::int64_t rows = lane_idx() < crew_.num_ranks ? rows_after_(chunk, lane_idx()) : 0;
    fence_system();
    // The warps that tell the chunks before are on their way: nothing they do waits for anybody.
    while (load_acquire_device(&local.num_chunks_sent) != static_cast<std::uint32_t>(chunk)) {
    }
    const bool final_chunk = chunk + 1 == plan_.num_chunks;
    // Whoever waits for the next turn tells more.
    const bool overtaken = !final_chunk && load_acquire_device(&local.chunk_arrivals[chunk + 1]) ==
                                               static_cast<std::uint32_t>(plan_.num_warps);
    if (!overtaken) tell(chunk, rows);
    __syncwarp();
    if (lane_idx() == 0) {
      local.chunk_arrivals[chunk] = 0;
      store_release_device(&local.num_chunks_sent, final_chunk ? 0U : static_cast<std::uint32_t>(chunk) + 1U);
    }
    if (final_chunk && posts_done_) post_done(crew_, epoch_);
  }

  /// `rows`: of the rank of this lane's number.
  __device__ void tell(int chunk, std::int64_t rows) const {
    for (int rank = lane_idx(); rank < crew_.num_ranks; rank += kWarpLanes) {
      if (rank >= kWarpLanes) rows = rows_after_(chunk, rank);
      store_relaxed_system(&control_of(crew_, rank).progress[crew_.rank], progress_value(epoch_, rows));
    }
  }

  const CrewParams& crew_;
  ChunkPlan plan_;
  std::uint64_t epoch_;
  RowsAfter rows_after_;
  bool posts_done_;
  int next_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_CHUNKS_CUH
