#ifndef FERRY_CUDA_COPY_PREFETCH_CUH
#define FERRY_CUDA_COPY_PREFETCH_CUH

namespace ferry::cuda::device {

/// Brings the line at `global` to the second-level cache (PTX ISA, prefetch); nothing waits for it.
__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_PREFETCH_CUH
