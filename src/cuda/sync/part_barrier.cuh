#ifndef FERRY_CUDA_SYNC_PART_BARRIER_CUH
#define FERRY_CUDA_SYNC_PART_BARRIER_CUH

#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Barrier for the `kNumWarps` warps of a block that call it, with all lanes, usable at one place in a kernel. Lanes
/// that come apart, as behind a loop or an early return, hang it (PTX ISA, barrier: `.aligned`), so they meet first.
template <int kNumWarps>
__device__ inline void meet_warps() {
  __syncwarp();
  asm volatile("bar.sync 1, %0;" ::"n"(kNumWarps * kWarpLanes) : "memory");
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_PART_BARRIER_CUH
