#ifndef FERRY_CUDA_COPY_PREFETCH_CUH
#define FERRY_CUDA_COPY_PREFETCH_CUH

/// In place of src/cuda/copy/prefetch.cuh where kernels are emulated.

namespace ferry::cuda::device {

inline void prefetch_l2(const void* /*global*/) {}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_PREFETCH_CUH
