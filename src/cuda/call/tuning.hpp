#ifndef FERRY_CUDA_CALL_TUNING_HPP
#define FERRY_CUDA_CALL_TUNING_HPP

/// How many multiprocessors each part of a call gets, where the caller does not say.

#include <cstdint>

#include "ferry/exchange.hpp"

namespace ferry::cuda {

struct DeviceLimits {
  int num_sms = 1;  ///< that this rank may use
  bool has_bulk = true;
  int num_ranks = 8;
};

struct DispatchPlan {
  bool bulk = true;
  int num_send_blocks = 1;
  int num_own_blocks = 0;  ///< of these, for the rows that stay on this GPU
  int num_receive_blocks = 0;
  bool few_run_warps = false;  ///< of sending blocks, each of which takes several rows at once instead of one
  int chunk_tokens = 1;
};

struct CombinePlan {
  bool bulk = true;
  int num_sum_blocks = 1;
  int num_stage_blocks = 0;
  int chunk_rows = 1;  ///< of each source, between two reports of all staging blocks
};

/// What a call moves.
struct CallShape {
  std::int64_t row_bytes = 14336;  ///< 7168 channels of bf16
  bool staged = false;             ///< peers cannot reach the rows: dispatch's output, combine's input
  bool unpacks = false;            ///< dispatch: scales, ids or weights are wanted
  bool takes_several = false;  ///< dispatch: rows bring scales of 4 bytes, and a warp has a lane for each entry of two
};

DispatchPlan plan_dispatch(const KernelOptions& options, const DeviceLimits& limits, const CallShape& shape);
CombinePlan plan_combine(const KernelOptions& options, const DeviceLimits& limits, const CallShape& shape);

/// Most blocks of a kernel that has no parts and is faster the more it gets: those of route, and the one that fills
/// rows without a token. `num_sms`: the caller's bound, 0: none.
int most_blocks(int num_sms, const DeviceLimits& limits);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_TUNING_HPP
