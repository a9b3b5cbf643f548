#ifndef FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_RECEIVE_CUH

/// Receiving row by row. Each warp takes every n-th arriving token row, from the sources in turn. It unpacks the row's
/// record into this rank's outputs and, if peers cannot reach the outputs, copies the row's payload to all output rows
/// that the token takes here. With the copy engine, rows and records land in shared memory two items ahead of their
/// use.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/intranode/dispatch_arrivals.cuh"
#include "cuda/intranode/dispatch_units.cuh"
#include "cuda/intranode/dispatch_unpack.cuh"

namespace ferry::cuda::device {

/// Token rows that one warp takes, in order of arrival.
class Arrivals {
 public:
  /// `arrived`: rows noted by the watching warp.
  __device__ Arrivals(const DispatchParams& params, const std::uint32_t* arrived, int warp, int num_warps)
      : params_(params), arrived_(arrived), walk_(num_peers(params.ranks), warp, num_warps) {
    for (int peer = 0; peer < params.ranks.num_ranks - 1; ++peer) {
      const std::int32_t count = run_from(params, source_of(peer)).num_rows;
      most_rows_ = count > most_rows_ ? count : most_rows_;
    }
  }

  /// Waits for the next token row; -1 if no row is left or the group broke, in this and all later calls. All lanes call
  /// it.
  __device__ std::int32_t next() {
    for (; !broken_ && walk_.idx() < most_rows_; walk_.advance()) {
      const int source = source_of(walk_.owner());
      const std::int32_t idx = walk_.idx();
      const Run run = run_from(params_, source);
      if (idx >= run.num_rows) continue;
      walk_.advance();
      // A broken group ends all sources: a load of another source's row could outlive this block.
      broken_ = !await_rows(arrived_, source, idx + 1);
      return broken_ ? -1 : run.first_row + idx;
    }
    return -1;
  }

 private:
  /// Sources after this rank come first, so that ranks do not all begin with the same source.
  __device__ int source_of(int peer) const {
    const int source = params_.ranks.rank + 1 + peer;
    return source < params_.ranks.num_ranks ? source : source - params_.ranks.num_ranks;
  }

  const DispatchParams& params_;
  const std::uint32_t* arrived_;
  TurnWalk walk_;
  std::int32_t most_rows_ = 0;
  bool broken_ = false;
};

/// Receives by the copy engine when a token may take several rows, which its record names.
class BulkReceiver {
 public:
  __device__ BulkReceiver(const DispatchParams& params, WarpStages& stages, Arrivals& arrivals)
      : params_(params),
        stages_(stages),
        arrivals_(arrivals),
        lands_record_(params.record.size_bytes() <= kStagedRecordBytes),
        num_pieces_(params.staged_rows != nullptr ? num_pieces(params.row_bytes) : 1) {}

  __device__ void run() {
    // Two items land while one is used. The first two turns only load.
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

  /// Starts to load the next item into a stage that is no longer in use.
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
      words_ = lands_record_ ? reinterpret_cast<const std::uint32_t*>(stages_.record(stage))
                             : record_in_memory(params_, token_row);
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
  bool lands_record_;
  int num_pieces_;
  std::int32_t landed_row_ = -1;
  int piece_ = 0;
  const std::uint32_t* words_ = nullptr;  // record of the item in use
  std::int32_t rows_ = -1;
  unsigned holders_ = 0;
};

/// Receives by loads and stores.
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
