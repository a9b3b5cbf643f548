#ifndef FERRY_CUDA_TUNING_HPP
#define FERRY_CUDA_TUNING_HPP

/// How many multiprocessors each part of a call gets, where the caller does not say.

#include "ferry/exchange.hpp"

namespace ferry::cuda {

struct DeviceLimits {
  int num_sms = 1;  ///< that this rank may use
  bool has_bulk = true;
};

struct DispatchPlan {
  bool bulk = true;
  int num_send_blocks = 1;
  int num_receive_blocks = 0;
  int chunk_tokens = 1;
};

struct CombinePlan {
  bool bulk = true;
  int num_sum_blocks = 1;
  int num_stage_blocks = 0;
  int chunk_rows = 1;
};

/// `staged`: peers cannot reach the output. `unpacks`: scales, ids or weights are wanted.
DispatchPlan plan_dispatch(const KernelOptions& options, const DeviceLimits& limits, bool staged, bool unpacks);
/// `staged`: peers cannot reach the input.
CombinePlan plan_combine(const KernelOptions& options, const DeviceLimits& limits, bool staged);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_TUNING_HPP
