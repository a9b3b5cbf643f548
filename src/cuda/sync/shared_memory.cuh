#ifndef FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
#define FERRY_CUDA_SYNC_SHARED_MEMORY_CUH

#include <cstddef>

namespace ferry::cuda::device {

/// Alignment at which the copy engine is fastest (kLandingBytes).
inline constexpr int kSharedAlignment = 128;

/// The block's shared memory, of the size that the launch sets. Aligned to kSharedAlignment.
__device__ inline std::byte* dynamic_shared() {
  extern __shared__ __align__(kSharedAlignment) std::byte ferry_dynamic_shared[];
  return ferry_dynamic_shared;
}

/// The block's object of this type, whose size is the same in every launch. Not initialised. It lies before the memory
/// of dynamic_shared(), so its size counts in full against a block's limit.
template <typename T>
__device__ inline T& static_shared() {
  static_assert(sizeof(T) % kSharedAlignment == 0, "no gap before the dynamic memory");
  __shared__ T object;
  return object;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
