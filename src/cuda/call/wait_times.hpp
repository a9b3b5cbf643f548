#ifndef FERRY_CUDA_CALL_WAIT_TIMES_HPP
#define FERRY_CUDA_CALL_WAIT_TIMES_HPP

/// What the kernels of one call have waited for each rank: the difference of what the rank's kernels had counted
/// (wait_count.cuh) before and after it. Kernels of their own take it, so that those of calls that are not asked are as
/// they were; what is before is taken away from the program's sums, so that there is nothing to keep in between.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sync/control.hpp"
#include "cuda/sync/rail_params.hpp"

namespace ferry::cuda {

struct Parts;

struct WaitTimesParams {
  const LocalState* local = nullptr;
  const RailState* rails = nullptr;  ///< null: the group is of one node
  int ranks_per_node = 1;
  int rank_in_node = 0;
  int node = 0;
  int num_nodes = 1;
  std::int64_t* times_ns = nullptr;  ///< [R]
  bool subtracts = false;
};
/// `times_ns`: [R] of the program; null: nobody asks.
WaitTimesParams wait_times_of(const Parts& parts, std::int64_t* times_ns);
cudaError_t launch_wait_times(const WaitTimesParams& params, cudaStream_t stream);
cudaError_t load_wait_times_kernel();

/// Adds to `params.times_ns`, unless it is null, what the kernels wait for that `launch` puts on the stream, whether or
/// not all of them can be launched.
template <typename Launch>
cudaError_t launch_timed(WaitTimesParams params, cudaStream_t stream, Launch launch) {
  if (params.times_ns == nullptr) return launch();
  params.subtracts = true;
  cudaError_t error = launch_wait_times(params, stream);
  if (error != cudaSuccess) return error;
  error = launch();
  params.subtracts = false;
  const cudaError_t added = launch_wait_times(params, stream);
  return error == cudaSuccess ? added : error;
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_WAIT_TIMES_HPP
