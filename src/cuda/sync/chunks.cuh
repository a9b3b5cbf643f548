#ifndef FERRY_CUDA_SYNC_CHUNKS_CUH
#define FERRY_CUDA_SYNC_CHUNKS_CUH

/// Progress of many warps, reported to the peers chunk by chunk. Warps finish their share of a chunk in any order. A
/// report waits until all written data has arrived, microseconds in which a warp moves no data. Therefore one warp of
/// each block reports, and the others mark in shared memory which chunks they have finished. The last block to finish a
/// chunk reports it to the peers. Chunks are reported in ascending order, because a flag may never decrease.
///
///   word                     writer             order                 publishes
///   marks[w], shared         warp w of a block  st.release.cta /      the warp's writes for chunks before that one,
///                                               ld.acquire.cta        bulk stores complete
///   local.chunk_arrivals[c]  reporting warps    atom.add.acq_rel.gpu  the block's writes to the peers; also read by
///                                                                     ld.acquire.gpu, by the last warp of c - 1, to
///                                                                     see if c is complete
///   local.num_chunks_sent    last warp of c     st.release.gpu /      progress of chunk c was stored, or that of a
///                                               ld.acquire.gpu        later chunk is about to be

#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// Value of a progress[] word: the lower half of the epoch, and the rows reported so far in that epoch.
__device__ inline std::uint64_t progress_value(std::uint64_t epoch, std::int64_t rows) {
  return epoch << 32 | static_cast<std::uint64_t>(rows);
}

/// Rows of `epoch` that the word counts. A word of another epoch counts none: it is from an earlier epoch, however the
/// halves compare, because no peer reports before this rank has taken part, and end_epoch leaves no word with the same
/// half.
__device__ inline std::uint64_t rows_reported(std::uint64_t word, std::uint64_t epoch) {
  return word >> 32 == (epoch & 0xFFFFFFFFU) ? word & 0xFFFFFFFFU : 0;
}

/// Waits until `source` has reported `num_rows` rows of `epoch`; false if the group broke. One thread calls it. `seen`:
/// the number of rows reported.
__device__ inline bool wait_rows(const RankParams& ranks, int source, std::uint64_t epoch, std::int64_t num_rows,
                                 std::uint64_t& seen) {
  const std::uint64_t* flag = ranks.control.progress + source;
  const auto expected = static_cast<std::uint64_t>(num_rows);
  const auto read = [flag, epoch, expected, &seen] {
    seen = rows_reported(load_acquire_system(flag), epoch);
    if (seen < expected) pause();
    return seen;
  };
  return wait_until(ranks, {Awaited::kRows, source, epoch}, read, expected, StepCount(ranks, source));
}

struct ChunkPlan {
  int num_warps = 1;  ///< reporting warps, over all blocks
  int num_chunks = 1;
};

/// One warp's part in reporting. `rows_after(chunk, rank)`: number of rows for `rank` that are complete once `chunk`
/// is.
template <typename RowsAfter>
class ChunkReporter {
 public:
  __device__ ChunkReporter(const RankParams& ranks, const ChunkPlan& plan, std::uint64_t epoch, RowsAfter rows_after)
      : ranks_(ranks), plan_(plan), epoch_(epoch), rows_after_(rows_after) {}

  /// Reports that this warp's writes for all chunks before `end` are complete (every lane's own, bulk ones included).
  /// All lanes call it.
  __device__ void report_before(int end) {
    for (; next_ < end; ++next_) report(next_);
  }

  /// First chunk that this warp has not reported.
  __device__ int next() const { return next_; }

 private:
  __device__ void report(int chunk) {
    LocalState& local = *ranks_.control.local;
    fence_async_proxy();
    __syncwarp();
    unsigned last = 0;
    if (lane_idx() == 0) {
      last = add_acq_rel_device(&local.chunk_arrivals[chunk], 1) + 1 == static_cast<std::uint32_t>(plan_.num_warps);
    }
    last = __shfl_sync(0xFFFFFFFFU, last, 0);
    __syncwarp();  // passes the data that lane 0 acquired to the lanes that store the progress
    if (last == 0) return;
    // All slow work precedes this warp's turn: turns are serial, so their length limits the rate of chunks.
    const std::int64_t rows = lane_idx() < ranks_.num_ranks ? rows_after_(chunk, lane_idx()) : 0;
    fence_system();
    // The loop is bounded: the warps that report the previous chunks are running and wait for no other rank.
    while (load_acquire_device(&local.num_chunks_sent) != static_cast<std::uint32_t>(chunk)) {
    }
    const bool final_chunk = chunk + 1 == plan_.num_chunks;
    // If so, the warp that waits for the next turn reports more rows.
    const bool overtaken = !final_chunk && load_acquire_device(&local.chunk_arrivals[chunk + 1]) ==
                                               static_cast<std::uint32_t>(plan_.num_warps);
    if (!overtaken) store_progress(chunk, rows);
    __syncwarp();
    if (lane_idx() == 0) {
      local.chunk_arrivals[chunk] = 0;
      store_release_device(&local.num_chunks_sent, final_chunk ? 0U : static_cast<std::uint32_t>(chunk) + 1U);
    }
  }

  /// `rows`: rows for the rank with this lane's number.
  __device__ void store_progress(int chunk, std::int64_t rows) const {
    for (int rank = lane_idx(); rank < ranks_.num_ranks; rank += kWarpLanes) {
      if (rank >= kWarpLanes) rows = rows_after_(chunk, rank);
      store_relaxed_system(&control_of(ranks_, rank).progress[ranks_.rank], progress_value(epoch_, rows));
    }
  }

  const RankParams& ranks_;
  ChunkPlan plan_;
  std::uint64_t epoch_;
  RowsAfter rows_after_;
  int next_ = 0;
};

/// Marks the progress of a warp that moves rows: the first chunk that it may not have finished.
class ChunkMarker {
 public:
  /// `mark`: this warp's word in shared memory, initially 0.
  __device__ explicit ChunkMarker(std::uint32_t* mark) : mark_(mark) {}

  /// Marks the same as ChunkReporter::report_before reports. All lanes call it.
  __device__ void report_before(int end) {
    if (end <= next_) return;
    next_ = end;
    fence_async_proxy();
    __syncwarp();
    if (lane_idx() == 0) store_release_block(mark_, static_cast<std::uint32_t>(end));
  }

  __device__ int next() const { return next_; }

 private:
  std::uint32_t* mark_;
  int next_ = 0;
};

/// Reports the marks of `num_warps` warps of this block until they have marked the end. All lanes of another warp of
/// the block call it.
template <typename Reporter>
__device__ inline void report_marks(const std::uint32_t* marks, int num_warps, int num_chunks, Reporter& reporter) {
  // The loop is bounded: the warps that mark are running and wait for no other rank.
  while (reporter.next() < num_chunks) {
    const auto all = static_cast<std::uint32_t>(num_chunks);
    const std::uint32_t marked = lane_idx() < num_warps ? load_acquire_block(marks + lane_idx()) : all;
    const auto least = static_cast<int>(__reduce_min_sync(0xFFFFFFFFU, marked));
    __syncwarp();  // passes the data that each lane acquired to all lanes
    if (least == reporter.next()) pause();
    reporter.report_before(least);
  }
}

/// Iterates over items that belong to n owners in turn (ranks, or the parts of a row): item i is number i / n of owner
/// i % n, so that all owners progress at the same pace. A warp takes items at a fixed step and divides only once.
class TurnWalk {
 public:
  /// Visits items first, first + step, …
  __device__ TurnWalk(int num_owners, int first, int step)
      : num_owners_(num_owners),
        idx_(first / num_owners),
        owner_(first % num_owners),
        step_idx_(step / num_owners),
        step_owner_(step % num_owners) {}

  /// Number of the current item among its owner's items.
  __device__ int idx() const { return idx_; }
  __device__ int owner() const { return owner_; }
  __device__ void advance() {
    idx_ += step_idx_;
    owner_ += step_owner_;
    if (owner_ < num_owners_) return;
    owner_ -= num_owners_;
    ++idx_;
  }

 private:
  int num_owners_;
  int idx_;
  int owner_;
  int step_idx_;
  int step_owner_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_CHUNKS_CUH
