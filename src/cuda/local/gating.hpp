#ifndef FERRY_CUDA_LOCAL_GATING_HPP
#define FERRY_CUDA_LOCAL_GATING_HPP

#include <cuda_runtime_api.h>

#include "numeric/gating.hpp"

namespace ferry::cuda {

/// Launches one kernel on at most `num_sms` multiprocessors of the current GPU: one warp per token, one warp for
/// several tokens if there are many, or one thread per token if there are few experts. With a capacity a second kernel
/// follows: one block per expert or, if tokens choose again, a single block. At most kMaxGatingExpertsOnGpu experts.
cudaError_t launch_gating(const numeric::GatingParams& params, int num_sms, cudaStream_t stream);
/// Loads the kernels before calls run: loading a kernel may wait for running kernels, and those of a group wait for
/// other ranks.
cudaError_t load_gating_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_GATING_HPP
