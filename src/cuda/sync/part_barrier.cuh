#ifndef FERRY_CUDA_SYNC_PART_BARRIER_CUH
#define FERRY_CUDA_SYNC_PART_BARRIER_CUH

#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// A barrier of the `kNumWarps` warps of a block that come to it, for one place in a kernel.
template <int kNumWarps>
__device__ inline void meet_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(kNumWarps * kWarpLanes) : "memory");
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_PART_BARRIER_CUH
