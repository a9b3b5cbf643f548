#ifndef FERRY_CUDA_LOCAL_GATING_HPP
#define FERRY_CUDA_LOCAL_GATING_HPP

#include <cuda_runtime_api.h>

#include "numeric/gating.hpp"

namespace ferry::cuda {

/// One kernel on at most `num_sms` multiprocessors of the current GPU: a warp for each token, for several of many, or,
/// of few experts, a thread; with a capacity a second one, of a block for each expert or, where tokens choose again, of
/// one. At most kMaxGatingExpertsOnGpu experts.
cudaError_t launch_gating(const numeric::GatingParams& params, int num_sms, cudaStream_t stream);
/// Loading a kernel can wait for those that run, and those of a group wait for other ranks: it comes first.
cudaError_t load_gating_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_GATING_HPP
