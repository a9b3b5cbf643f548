#ifndef FERRY_CUDA_COPY_PREFETCH_CUH
#define FERRY_CUDA_COPY_PREFETCH_CUH

/// In place of src/cuda/copy/prefetch.cuh where kernels are emulated.

#include <cstddef>
#include <cstring>

#include "cuda/copy/bulk_copy.cuh"

namespace ferry::cuda::device {

inline void prefetch_l2(const void* /*global*/) {}

template <std::size_t kBytes>
void start_fetch(void* shared, const void* global) {
  std::memcpy(shared, global, kBytes);
}
inline void wait_fetches() {}
inline void announce_fetches(std::uint64_t* barrier) { expect_loads(barrier, 0); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_PREFETCH_CUH
