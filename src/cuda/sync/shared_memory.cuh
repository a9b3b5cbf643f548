#ifndef FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
#define FERRY_CUDA_SYNC_SHARED_MEMORY_CUH

#include <cstddef>

namespace ferry::cuda::device {

/// To what the copy engine likes best (kLandingBytes).
inline constexpr int kSharedAlignment = 128;

/// The block's shared memory, of as many bytes as the launch asks for. Aligned to kSharedAlignment.
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(kSharedAlignment) std::byte ferry_dynamic_shared[];
  return ferry_dynamic_shared;
}

/// The block's object of this type: what has the same size in every launch. Not initialised. It comes before the memory
/// of dynamic_shared(), so its size counts in full against what a block may have.
template <typename T>
__device__ inline T& static_shared() {
  static_assert(sizeof(T) % kSharedAlignment == 0, "no gap before the dynamic memory");
  __shared__ T object;
  return object;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
