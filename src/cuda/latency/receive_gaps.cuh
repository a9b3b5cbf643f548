#ifndef FERRY_CUDA_LATENCY_RECEIVE_GAPS_CUH
#define FERRY_CUDA_LATENCY_RECEIVE_GAPS_CUH

/// Rows of the slab that hold no token, in the receive half of latency_dispatch.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/receive_counts.cuh"

namespace ferry::cuda::device {

inline constexpr int kReceiveWarps = kDispatchThreads / kWarpLanes;

/// Clears a row of the slab that holds no token. `row`: index over the rows of all experts. One warp.
__device__ inline void clear_row(const DispatchReceiveRows& params, int row, int capacity) {
  auto* x = reinterpret_cast<uint4*>(params.x + row * params.x_stride);
  const std::int64_t count = params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4));
#pragma unroll 1
  for (std::int64_t i = lane_idx(); i < count; i += kWarpLanes) x[i] = make_uint4(0, 0, 0, 0);
  const SlabScales& scales = params.scales;
  const int expert = row / capacity;
#pragma unroll 1
  for (int column = lane_idx(); column < params.row.num_scales; column += kWarpLanes) {
    const std::int64_t at =
        expert * scales.expert_stride + (row - expert * capacity) * scales.row_stride + column * scales.column_stride;
    if (params.row.scale_bytes == sizeof(std::uint32_t)) {
      reinterpret_cast<std::uint32_t*>(scales.data)[at] = 0;
    } else {
      scales.data[at] = std::byte{0};
    }
  }
}

/// First of the blocks that clear rows without a token.
__device__ inline int first_gap_block(const DispatchReceiveRows& params) {
  return params.num_gap_blocks == 0 ? params.first_receiver : static_cast<int>(gridDim.x) - params.num_gap_blocks;
}
/// Whether this block is one of them. The block that reports is not.
__device__ inline bool clears_gaps(const DispatchReceiveRows& params) {
  return blockIdx.x != 0 && static_cast<int>(blockIdx.x) >= first_gap_block(params);
}

/// Rows of the slab that hold no token; some blocks share them, `step` apart for `worker`.
struct SlabGaps {
  int first = 0;
  int step = 1;
  int num_rows = 0;  ///< fits 32 bits
  int capacity = 1;

  __device__ static SlabGaps of(const LatencyParams& call, int first_block, int worker, int workers_per_block) {
    const auto capacity = static_cast<int>(call.slab_capacity);
    const int block = static_cast<int>(blockIdx.x) - first_block;
    return {block * workers_per_block + worker, (static_cast<int>(gridDim.x) - first_block) * workers_per_block,
            call.num_local_experts * capacity, capacity};
  }
  __device__ bool is_gap(const ExpertTables& experts, int row) const {
    const int expert = row / capacity;
    return row - expert * capacity >= experts.local_rows[expert];
  }
};

/// Marks the rows in the source table. All threads of these blocks.
__device__ inline void clear_sources(const LatencyParams& call, const DispatchReceiveRows& params,
                                     const ExpertTables& experts) {
  const SlabGaps gaps = SlabGaps::of(call, first_gap_block(params), static_cast<int>(threadIdx.x), kDispatchThreads);
#pragma unroll 1
  for (int row = gaps.first; row < gaps.num_rows; row += gaps.step) {
    if (gaps.is_gap(experts, row)) reinterpret_cast<int2*>(call.tables.source)[row] = make_int2(-1, -1);
  }
}

/// Clears the rows. All warps of these blocks.
__device__ inline void clear_rows(const LatencyParams& call, const DispatchReceiveRows& params,
                                  const ExpertTables& experts) {
  const SlabGaps gaps = SlabGaps::of(call, first_gap_block(params), warp_idx(), kReceiveWarps);
#pragma unroll 1
  for (int row = gaps.first; row < gaps.num_rows; row += gaps.step) {
    if (gaps.is_gap(experts, row)) clear_row(params, row, gaps.capacity);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_RECEIVE_GAPS_CUH
