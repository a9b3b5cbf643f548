#ifndef FERRY_CUDA_CALL_WAIT_TIMES_HPP
#define FERRY_CUDA_CALL_WAIT_TIMES_HPP

/// Time that the kernels of one call waited for each rank: the difference of the rank's wait counts (wait_count.cuh)
/// before and after the call. Separate kernels take the counts, so that calls without this measurement are unchanged.
/// The count before is subtracted from the program's sums, so that no state is kept in between.

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
  int num_group_ranks = 0;           ///< ranks that latency mode over several nodes waits for
  std::int64_t* times_ns = nullptr;  ///< [R]
  bool subtracts = false;
};
/// `times_ns`: [R] sums of the program; null: the program does not measure.
WaitTimesParams wait_times_of(const Parts& parts, std::int64_t* times_ns);
cudaError_t launch_wait_times(const WaitTimesParams& params, cudaStream_t stream);
cudaError_t load_wait_times_kernel();

/// Adds to `params.times_ns`, unless it is null, the time that the kernels put on the stream by `launch` wait, whether
/// or not all of them can be launched.
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
