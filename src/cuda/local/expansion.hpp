#ifndef FERRY_CUDA_LOCAL_EXPANSION_HPP
#define FERRY_CUDA_LOCAL_EXPANSION_HPP

#include <cuda_runtime_api.h>

#include "plan/expansion.hpp"

namespace ferry::cuda {

cudaError_t launch_expand(const plan::ExpandParams& params, int num_sms, cudaStream_t stream);
cudaError_t launch_reduce(const plan::ReduceParams& params, int num_sms, cudaStream_t stream);
cudaError_t load_expansion_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_EXPANSION_HPP
