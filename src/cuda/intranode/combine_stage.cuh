#ifndef FERRY_CUDA_INTRANODE_COMBINE_STAGE_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_STAGE_CUH

/// Staging warps: copy this rank's rows to memory that peers reach, each source's rows in the order in which it will
/// want them, all sources at the same pace. They wait for nobody: until the peers have entered the call only reports
/// of progress must wait, and rows that are staged for a call that is then refused are not looked at.

#include "cuda/intranode/combine_sum_bulk.cuh"

namespace ferry::cuda::device {

/// The rows that one warp stages, in order. Items go round the other ranks, so that all get theirs at the same pace.
class StagedRows {
 public:
  __device__ StagedRows(const CombineParams& params, int warp, int num_warps)
      : params_(params),
        walk_(params.ranks.num_ranks < 2 ? 1 : params.ranks.num_ranks - 1, warp, num_warps),
        row_(warp),
        step_(num_warps),
        chunk_end_(params.chunks.end_row(0)) {
    if (!params.one_row_per_token) return;
    for (int source = 0; source < params.ranks.num_ranks; ++source) {
      const std::int32_t count = params.source_base[source + 1] - params.source_base[source];
      if (source != params.ranks.rank && count > most_rows_) most_rows_ = count;
    }
  }

  /// Most rows that any source gets.
  __device__ std::int32_t most_rows() const { return most_rows_; }

  struct Row {
    std::int64_t row = -1;  ///< -1: no more
    int chunk = 0;          ///< rows of chunks before this one are all started
  };

  __device__ Row next() { return params_.one_row_per_token ? next_of_sources() : next_of_experts(); }

 private:
  __device__ Row next_of_sources() {
    for (; walk_.idx() < most_rows_; walk_.advance()) {
      const int behind = params_.ranks.rank + 1 + walk_.owner();
      const int source = behind < params_.ranks.num_ranks ? behind : behind - params_.ranks.num_ranks;
      const std::int32_t idx = walk_.idx();
      const std::int64_t row = params_.source_base[source];
      if (idx >= params_.source_base[source + 1] - row) continue;
      while (idx >= chunk_end_) chunk_end_ = params_.chunks.end_row(++chunk_);
      walk_.advance();
      return {row + idx, chunk_};
    }
    return {};
  }

  /// Grouped by expert: a source's first token may be anywhere, so progress is reported only when everything is staged.
  __device__ Row next_of_experts() {
    const std::int64_t num_rows = params_.summary->num_used_rows;
    while (row_ < num_rows) {
      const std::int64_t row = row_;
      row_ += step_;
      const int source = params_.source[2 * row];
      if (source >= 0 && source != params_.ranks.rank) return {row, 0};
    }
    return {};
  }

  const CombineParams& params_;
  TurnWalk walk_;
  std::int64_t row_;
  std::int64_t step_;
  std::int32_t most_rows_ = 0;
  int chunk_ = 0;
  std::int64_t chunk_end_;
};

template <typename Reporter>
__device__ inline void stage_by_threads(const CombineParams& params, StagedRows& rows, Reporter& reporter) {
  constexpr int kUnroll = 8;
  const auto count = static_cast<int>(params.row_bytes / static_cast<std::int64_t>(sizeof(uint4)));
  for (StagedRows::Row row = rows.next(); row.row >= 0; row = rows.next()) {
    reporter.report_before(row.chunk);
    const auto* from = reinterpret_cast<const uint4*>(params.x + row.row * params.x_stride);
    auto* to = reinterpret_cast<uint4*>(params.staging + row.row * params.row_bytes);
    for (int first = lane_idx(); first < count; first += kUnroll * kWarpLanes) {
      uint4 values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpLanes < count) values[i] = from[first + i * kWarpLanes];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i * kWarpLanes < count) to[first + i * kWarpLanes] = values[i];
      }
    }
  }
}

/// The stager divides the memory of a warp's sets into smaller slots, to have more pieces in flight.
inline constexpr int kStagerPieces = 4;
inline constexpr int kStagerPieceBytes = kSumSets * kSetBytes / kStagerPieces;

/// Of so many chunks, the first ones, a warp waits for its last store at once: peers have nothing else to sum.
inline constexpr int kEagerChunks = 2;

/// By the copy engine, through the memory of the warp's sets.
template <typename Reporter>
class BulkStager {
 public:
  __device__ BulkStager(const CombineParams& params, StagedRows& rows, Reporter& reporter, const SumStages& stages)
      : params_(params), rows_(rows), reporter_(reporter), stages_(stages) {}

  __device__ void run() {
    // Three pieces land while one is stored. The first turns only land.
    constexpr int kAhead = 3;
    static_assert(kStagerPieces == kAhead + 1);
    Piece now;
    Piece next;
    Piece after;
    int slot = kStagerPieces - kAhead;
#pragma unroll 1
    for (int turn = -kAhead; turn < 0 || now.bytes != 0; ++turn) {
      if (turn >= 0) store(now, next, slot);
      now = next;
      next = after;
      after = load(slot == 0 ? kStagerPieces - 1 : slot - 1);
      slot = slot + 1 == kStagerPieces ? 0 : slot + 1;
    }
    if (lane_idx() == 0) wait_store_groups<0>();
    __syncwarp();
  }

 private:
  struct Piece {
    std::int64_t row = 0;
    std::int64_t offset = 0;
    std::uint32_t bytes = 0;  ///< 0: no more
    int chunk = 0;
  };

  __device__ std::byte* slot_data(int slot) const { return stages_.sets + slot * kStagerPieceBytes; }

  /// Starts the next piece into the slot that the piece before the latest was stored from.
  __device__ Piece load(int slot) {
    if (offset_ == 0) row_ = rows_.next();
    if (row_.row < 0) return {};
    if (!begun_) reporter_.report_before(row_.chunk);
    begun_ = true;
    const std::int64_t left = params_.row_bytes - offset_;
    const Piece piece{row_.row, offset_,
                      static_cast<std::uint32_t>(left < kStagerPieceBytes ? left : kStagerPieceBytes), row_.chunk};
    offset_ = left > kStagerPieceBytes ? offset_ + kStagerPieceBytes : 0;
    if (lane_idx() == 0) {
      wait_store_reads<1>();
      expect_loads(stages_.barriers + slot, piece.bytes);
      start_load(slot_data(slot), params_.x + piece.row * params_.x_stride + piece.offset, piece.bytes,
                 stages_.barriers + slot);
    }
    __syncwarp();
    return piece;
  }

  __device__ void store(const Piece& piece, const Piece& next, int slot) {
    wait_barrier(stages_.barriers + slot, parities_ >> slot & 1U);
    parities_ ^= 1U << slot;
    if (lane_idx() == 0) {
      start_store(params_.staging + piece.row * params_.row_bytes + piece.offset, slot_data(slot), piece.bytes);
      close_store_group();
    }
    __syncwarp();
    if (next.chunk > reporter_.next() && next.chunk <= kEagerChunks) {
      if (lane_idx() == 0) wait_store_groups<0>();
      __syncwarp();
      reporter_.report_before(next.chunk);
    }
    // Rows of earlier chunks than the last piece's are complete when only this store and the last one are open.
    if (chunk_before_ > reporter_.next()) {
      if (lane_idx() == 0) wait_store_groups<2>();
      __syncwarp();
      reporter_.report_before(chunk_before_);
    }
    chunk_before_ = piece.chunk;
  }

  const CombineParams& params_;
  StagedRows& rows_;
  Reporter& reporter_;
  SumStages stages_;
  StagedRows::Row row_;
  std::int64_t offset_ = 0;
  std::uint32_t parities_ = 0;
  int chunk_before_ = 0;
  bool begun_ = false;
};

/// Waits until all ranks have entered a call of this epoch, whichever; false when the group broke. All lanes of a warp.
__device__ inline bool await_all_entered(const RankParams& ranks, std::uint64_t epoch) {
  bool here = true;
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    const auto read = [&ranks, rank, epoch] {
      const std::uint64_t entered = entry_flags(ranks, epoch).load(rank);
      return entered != 0 ? entered : count_flags(ranks).load(rank);
    };
    here = wait_until(ranks, {Awaited::kEntry, rank, epoch}, read, epoch) && here;
  }
  return __all_sync(0xFFFFFFFFU, static_cast<int>(here)) != 0;
}

/// A staging block, and its words in shared memory.
struct StageBlock {
  int idx;
  int num_warps;         ///< that stage; one more reports
  std::uint32_t* marks;  ///< [num_warps] ChunkMarker's, 0
};

/// All that a block stages, each warp its own part. `stages` as for summing, where kBulk. All threads of the block. Not
/// inlined: summing would lose the instruction cache to it.
template <bool kBulk>
__device__ __noinline__ inline void stage_rows(const CombineParams& params, const SumStages& stages,
                                               std::uint64_t epoch, const StageBlock& block) {
  StagedRows rows(params, block.idx * block.num_warps + warp_idx(), params.num_stage_blocks * block.num_warps);
  const int num_chunks = params.chunks.num_chunks(rows.most_rows());
  if (warp_idx() == block.num_warps) {
    // Until a rank has entered this call, its words of progress are those of the call before.
    if (!await_all_entered(params.ranks, epoch)) return;
    const auto rows_after = [&params, num_chunks](int chunk, int source) -> std::int64_t {
      const std::int64_t count = params.source_base[source + 1] - params.source_base[source];
      const std::int64_t staged = params.chunks.end_row(chunk);
      return chunk + 1 == num_chunks || count < staged ? count : staged;
    };
    ChunkReporter reporter(params.ranks, {params.num_stage_blocks, num_chunks}, epoch, rows_after);
    report_marks(block.marks, block.num_warps, num_chunks, reporter);
    return;
  }
  ChunkMarker marker(block.marks + warp_idx());
  if constexpr (kBulk) {
    BulkStager(params, rows, marker, stages).run();
  } else {
    stage_by_threads(params, rows, marker);
  }
  marker.report_before(num_chunks);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_STAGE_CUH
