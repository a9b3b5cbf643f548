#ifndef FERRY_CUDA_LOCAL_GATING_ENTRY_CUH
#define FERRY_CUDA_LOCAL_GATING_ENTRY_CUH

/// Data that gating kernels read and write: logits and entries of the choices.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "numeric/gating.hpp"

namespace ferry::cuda::device {

using numeric::GatingParams;
using numeric::kClosedKey;

struct GatingKernelParams {
  GatingParams gating;
  int run_length = 1;       ///< experts per lane, at most kRun
  bool whole_runs = false;  ///< each lane has run_length = kRun experts or none, and can load them four at a time
  bool whole_rows = false;  ///< a thread can load a row four logits at a time (gating_thread.cuh)
  int group_lanes = 0;      ///< lanes of a group, a power of two, if groups are whole lanes of one warp; else 0
  int slot_lanes = 32;      ///< smallest power of two that is at least K
  int batch_tokens = 1;     ///< tokens whose choices a warp weighs together, at most 32 / slot_lanes
};

__device__ inline float logit_at(const GatingParams& params, std::int64_t token, int expert) {
  const std::int64_t at = token * params.num_experts + expert;
  if (!params.is_bfloat16) return static_cast<const float*>(params.logits)[at];
  return numeric::float_from_bfloat16(static_cast<const std::uint16_t*>(params.logits)[at]);
}

struct Entry {
  std::int64_t token = 0;
  int k = 0;
};

/// Entry 32 positions after `entry`.
__device__ inline Entry entry_after_warp(const Entry& entry, int num_topk) {
  Entry next{entry.token + kWarpLanes / num_topk, entry.k + kWarpLanes % num_topk};
  if (next.k >= num_topk) {
    next.k -= num_topk;
    ++next.token;
  }
  return next;
}

__device__ inline void store_entry(const GatingParams& params, const Entry& entry, int id, float weight) {
  const std::int64_t at = entry.token * params.ids_row_stride + entry.k * params.ids_column_stride;
  if (params.wide_ids) {
    static_cast<std::int64_t*>(params.ids)[at] = id;
  } else {
    static_cast<std::int32_t*>(params.ids)[at] = id;
  }
  params.weights[entry.token * params.weights_row_stride + entry.k * params.weights_column_stride] = weight;
}

__device__ inline int load_id(const GatingParams& params, const Entry& entry) {
  const std::int64_t at = entry.token * params.ids_row_stride + entry.k * params.ids_column_stride;
  return params.wide_ids ? static_cast<int>(static_cast<const std::int64_t*>(params.ids)[at])
                         : static_cast<const std::int32_t*>(params.ids)[at];
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_GATING_ENTRY_CUH
