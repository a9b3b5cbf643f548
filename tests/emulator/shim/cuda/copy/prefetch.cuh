#ifndef FERRY_CUDA_COPY_PREFETCH_CUH
#define FERRY_CUDA_COPY_PREFETCH_CUH

/// In place of src/cuda/copy/prefetch.cuh where kernels are emulated.

#include <cstddef>
#include <cstring>

namespace ferry::cuda::device {

inline void prefetch_l2(const void* /*global*/) {}

template <std::size_t kBytes>
void start_fetch(void* shared, const void* global) {
  std::memcpy(shared, global, kBytes);
}
inline void wait_fetches() {}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_PREFETCH_CUH
