#ifndef FERRY_CUDA_LOCAL_GATING_TEAM_HPP
#define FERRY_CUDA_LOCAL_GATING_TEAM_HPP

#include <cuda_runtime_api.h>

#include "numeric/gating.hpp"

namespace ferry::cuda {

/// For launch_gating: chooses with several tokens per warp, without enforcing the capacity, if there is a kernel for
/// these experts and options and enough tokens. False: nothing was launched. `error`: error of the launch.
bool launch_gating_teams(const numeric::GatingParams& gating, int num_sms, cudaStream_t stream, cudaError_t* error);
cudaError_t load_gating_team_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_GATING_TEAM_HPP
