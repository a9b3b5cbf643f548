#ifndef FERRY_CUDA_COPY_WARP_COPY_CUH
#define FERRY_CUDA_COPY_WARP_COPY_CUH

/// Copies by the loads and stores of a warp, for devices without the bulk copy engine.

#include <cstddef>
#include <cstdint>

#include "cuda/copy/prefetch.cuh"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Copies `bytes` (a multiple of 16) with one warp's loads and stores, of which kUnroll in each lane are under way at a
/// time.
template <int kUnroll = 4>
__device__ inline void copy_by_warp(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(uint4));
#pragma unroll 1
  for (std::int64_t first = lane_idx(); first < count; first += kUnroll * kWarpLanes) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) values[i] = source[first + i * kWarpLanes];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) target[first + i * kWarpLanes] = values[i];
    }
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_WARP_COPY_CUH
