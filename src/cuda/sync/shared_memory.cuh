#ifndef FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
#define FERRY_CUDA_SYNC_SHARED_MEMORY_CUH

#include <cstddef>

namespace ferry::cuda::device {

/// The block's shared memory, of as many bytes as the launch asks for. Aligned to what the copy engine likes best
/// (kLandingBytes).
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(128) std::byte ferry_dynamic_shared[];
  return ferry_dynamic_shared;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
