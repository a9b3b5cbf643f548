#ifndef FERRY_CUDA_CALL_TUNING_HPP
#define FERRY_CUDA_CALL_TUNING_HPP

/// Number of multiprocessors of each part of a call, if the caller does not set it.

#include <cstdint>
#include <limits>

#include "ferry/exchange.hpp"

namespace ferry::cuda {

struct DeviceLimits {
  int num_sms = 1;  ///< multiprocessors that this rank may use
  bool has_bulk = true;
  int num_ranks = 8;
  /// Most multiprocessors whose blocks wait for other ranks, unless the caller sets a number.
  int num_waiting_sms = std::numeric_limits<int>::max();
};

struct DispatchPlan {
  bool bulk = true;
  int num_send_blocks = 1;
  int num_own_blocks = 0;  ///< blocks among these for the rows that stay on this GPU
  int num_receive_blocks = 0;
  bool few_run_warps = false;  ///< of sending blocks, each of which then takes several rows at a time instead of one
  int chunk_tokens = 1;
};

struct CombinePlan {
  bool bulk = true;
  int num_sum_blocks = 1;
  int num_stage_blocks = 0;
  int chunk_rows = 1;  ///< rows of each source between two reports of all staging blocks
};

/// Properties of the data that a call moves.
struct CallShape {
  std::int64_t row_bytes = 14336;  ///< 7168 channels of bf16
  bool staged = false;             ///< peers cannot reach the rows: dispatch's output, or combine's input
  bool quantized = false;          ///< combine: staging quantises the rows, also those that stay on this GPU
  bool unpacks = false;            ///< dispatch: the caller wants scales, ids or weights
  bool takes_several = false;      ///< dispatch: rows have 4-byte scales, and a warp has one lane for each entry of two
                                   ///< rows
};

DispatchPlan plan_dispatch(const KernelOptions& options, const DeviceLimits& limits, const CallShape& shape);
CombinePlan plan_combine(const KernelOptions& options, const DeviceLimits& limits, const CallShape& shape);

/// Most blocks of a kernel without separate parts that runs faster with more blocks: those of route, and the kernel
/// that fills rows without a token. `num_sms`: the caller's bound, 0: none.
int most_blocks(int num_sms, const DeviceLimits& limits);
/// Most blocks that wait for other ranks at the same time, so that other kernels always find multiprocessors.
int most_waiting_blocks(int num_sms, const DeviceLimits& limits);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_TUNING_HPP
