#ifndef FERRY_CUDA_DRIVER_EMPTY_KERNEL_HPP
#define FERRY_CUDA_DRIVER_EMPTY_KERNEL_HPP

#include <cuda_runtime_api.h>

namespace ferry::cuda {

/// Runs a kernel that does nothing, and waits for it.
cudaError_t run_empty_kernel(cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_EMPTY_KERNEL_HPP
