#ifndef FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_CUH

/// Receiving warps. Each takes every n-th arriving token row, source by source in turn: unpacks its record into this
/// rank's outputs and, where peers could not reach those, copies its payload there. Rows and records land in shared
/// memory two items ahead of their use.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/intranode/dispatch_unpack.cuh"

namespace ferry::cuda::device {

/// Waits until `source` has reported `num_rows` rows, and returns how many it has; -1 when the group broke. All lanes.
/// Not inlined, because warps come to it once a chunk, and the instruction cache is for what they do with every row.
__device__ __noinline__ inline std::int32_t await_rows(const RankParams& ranks, int source, std::int64_t num_rows,
                                                       std::uint64_t epoch) {
  std::uint64_t seen = 0;
  bool here = true;
  if (lane_idx() == 0) here = wait_rows(ranks, source, epoch, num_rows, seen);
  const auto rows = here ? static_cast<std::int32_t>(seen) : -1;
  const std::int32_t all = __shfl_sync(0xFFFFFFFFU, rows, 0);
  __syncwarp();  // hands what lane 0 has acquired to all of them
  return all;
}

/// The token rows that one warp takes, in the order in which they arrive.
class Arrivals {
 public:
  __device__ Arrivals(const DispatchParams& params, std::uint64_t epoch, int warp, int num_warps)
      : params_(params), epoch_(epoch), walk_(params.ranks.num_ranks, warp, num_warps) {
    for (int source = 0; source < params.ranks.num_ranks; ++source) {
      const std::int32_t count = params.source_base[source + 1] - params.source_base[source];
      most_rows_ = count > most_rows_ ? count : most_rows_;
    }
  }

  /// Waits for the next token row; -1: no more, or the group broke, and then also from now on. All lanes.
  __device__ std::int32_t next() {
    const int num_ranks = params_.ranks.num_ranks;
    for (; !broken_ && walk_.idx() < most_rows_; walk_.advance()) {
      const int behind = walk_.owner() + params_.ranks.rank;
      const int source = behind < num_ranks ? behind : behind - num_ranks;
      const std::int32_t idx = walk_.idx();
      const std::int32_t first_row = params_.source_base[source];
      // What this rank sends to itself is in its outputs already.
      if (source == params_.ranks.rank || idx >= params_.source_base[source + 1] - first_row) continue;
      walk_.advance();
      // A row of another source that is there would be loaded by a block that ends before the load does.
      broken_ = !await(source, idx);
      return broken_ ? -1 : first_row + idx;
    }
    return -1;
  }

 private:
  /// Waits until row `idx` from `source` is here; false when the group broke. All lanes; lane s remembers what is here
  /// from sources s, s + 32, … of the last one asked.
  __device__ bool await(int source, std::int32_t idx) {
    const int keeper = source % kWarpLanes;
    const bool known = known_source_ == source && idx < known_rows_;
    if (__shfl_sync(0xFFFFFFFFU, static_cast<int>(known), keeper) != 0) return true;
    const std::int32_t rows = await_rows(params_.ranks, source, std::int64_t{idx} + 1, epoch_);
    fence_async_proxy();
    if (lane_idx() == keeper) {
      known_source_ = source;
      known_rows_ = rows;
    }
    return rows >= 0;
  }

  const DispatchParams& params_;
  std::uint64_t epoch_;
  TurnWalk walk_;
  std::int32_t most_rows_ = 0;
  int known_source_ = -1;
  std::int32_t known_rows_ = 0;
  bool broken_ = false;
};

/// By the copy engine.
class BulkReceiver {
 public:
  __device__ BulkReceiver(const DispatchParams& params, WarpStages& stages, Arrivals& arrivals)
      : params_(params),
        stages_(stages),
        arrivals_(arrivals),
        has_record_(params.unpacks || (params.record.num_words != 0 && !params.one_row_per_token)),
        lands_record_(has_record_ && params.record.size_bytes() <= kStagedRecordBytes),
        num_pieces_(params.staged_rows != nullptr ? num_pieces(params.row_bytes) : 1) {}

  __device__ void run() {
    // Two items land while one is used. The first two turns only land.
    constexpr int kAhead = 2;
    static_assert(kStages == kAhead + 1);
    Landing now;
    Landing next;
    int stage = kStages - kAhead;
#pragma unroll 1
    for (int turn = -kAhead; turn < 0 || now.token_row >= 0; ++turn) {
      if (turn >= 0) use(now, stage);
      now = next;
      next = land(stage == 0 ? kStages - 1 : stage - 1);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if (lane_idx() == 0) wait_store_groups<0>();
    __syncwarp();
  }

 private:
  struct Landing {
    std::int32_t token_row = -1;
    int piece = 0;
  };

  /// Starts the next item into a stage whose last use is over.
  __device__ Landing land(int stage) {
    Landing landing;
    if (piece_ == 0) landed_row_ = arrivals_.next();
    landing.token_row = landed_row_;
    landing.piece = piece_;
    if (landed_row_ < 0) return landing;
    const bool copies = params_.staged_rows != nullptr;
    piece_ = copies && piece_ + 1 < num_pieces_ ? piece_ + 1 : 0;
    if (lane_idx() == 0) {
      wait_store_reads<1>();
      const std::uint32_t bytes = copies ? piece_bytes(params_.row_bytes, landing.piece) : 0;
      const auto record_bytes =
          static_cast<std::uint32_t>(lands_record_ && landing.piece == 0 ? params_.record.size_bytes() : 0);
      std::uint64_t* barrier = stages_.barriers + stage;
      expect_loads(barrier, bytes + record_bytes);
      if (bytes != 0) {
        start_load(stages_.stage(stage),
                   params_.staged_rows + landed_row_ * params_.row_bytes +
                       static_cast<std::int64_t>(landing.piece) * kPieceBytes,
                   bytes, barrier);
      }
      if (record_bytes != 0) {
        start_load(stages_.record(stage), params_.records + landed_row_ * params_.record.size_bytes(), record_bytes,
                   barrier);
      }
    }
    __syncwarp();
    return landing;
  }

  __device__ void use(const Landing& landing, int stage) {
    stages_.wait_loaded(stage);
    const std::int32_t token_row = landing.token_row;
    if (landing.piece == 0) {
      words_ = has_record_ && !lands_record_ ? record_in_memory(params_, token_row)
                                             : reinterpret_cast<const std::uint32_t*>(stages_.record(stage));
      rows_ = find_rows(params_, words_, token_row);
      holders_ = first_holders(rows_);
    }
    if (params_.staged_rows != nullptr) {
      for (unsigned left = holders_; left != 0; left &= left - 1) {
        const std::int32_t row = __shfl_sync(0xFFFFFFFFU, rows_, __ffs(static_cast<int>(left)) - 1);
        if (lane_idx() == 0) {
          start_store(
              params_.out.x + row * params_.out.x_stride + static_cast<std::int64_t>(landing.piece) * kPieceBytes,
              stages_.stage(stage), piece_bytes(params_.row_bytes, landing.piece));
        }
      }
    }
    if (lane_idx() == 0) close_store_group();
    if (landing.piece == 0 && params_.unpacks) unpack(params_, words_, token_row, rows_);
    __syncwarp();
  }

  const DispatchParams& params_;
  WarpStages& stages_;
  Arrivals& arrivals_;
  bool has_record_;
  bool lands_record_;
  int num_pieces_;
  std::int32_t landed_row_ = -1;
  int piece_ = 0;
  const std::uint32_t* words_ = nullptr;  // being used
  std::int32_t rows_ = -1;
  unsigned holders_ = 0;
};

/// By loads and stores.
__device__ inline void receive_by_threads(const DispatchParams& params, Arrivals& arrivals) {
  for (std::int32_t row = arrivals.next(); row >= 0; row = arrivals.next()) {
    const std::uint32_t* words = params.record.num_words != 0 ? record_in_memory(params, row) : nullptr;
    const std::int32_t rows = find_rows(params, words, row);
    if (params.staged_rows != nullptr) {
      for (unsigned left = first_holders(rows); left != 0; left &= left - 1) {
        const std::int32_t to = __shfl_sync(0xFFFFFFFFU, rows, __ffs(static_cast<int>(left)) - 1);
        copy_by_warp(params.out.x + to * params.out.x_stride, params.staged_rows + row * params.row_bytes,
                     params.row_bytes);
      }
    }
    if (params.unpacks) unpack(params, words, row, rows);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_CUH
