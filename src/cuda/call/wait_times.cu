#include "cuda/call/wait_times.hpp"

#include "cuda/driver/launch.hpp"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

constexpr int kThreads = kMaxRanks > kMaxNodes ? kMaxRanks : kMaxNodes;

/// Adds with an atomic: calls on other streams may add to the same sums at the same time.
__device__ void add_time(const WaitTimesParams& params, int rank, std::uint64_t counted_ns) {
  if (counted_ns == 0) return;
  add_relaxed_device(reinterpret_cast<std::uint64_t*>(params.times_ns + rank),
                     params.subtracts ? 0 - counted_ns : counted_ns);
}

__global__ void __launch_bounds__(kThreads) wait_times_kernel(const __grid_constant__ WaitTimesParams params) {
  const auto idx = static_cast<int>(threadIdx.x);
  const volatile LocalState& local = *params.local;
  if (idx < params.ranks_per_node) {
    add_time(params, params.node * params.ranks_per_node + idx, local.wait_ns[idx] + local.step_wait_ns[idx]);
  }
  if (idx < params.num_group_ranks) add_time(params, idx, local.group_wait_ns[idx]);
  if (params.rails != nullptr && idx < params.num_nodes && idx != params.node) {
    const volatile RailState& rails = *params.rails;
    add_time(params, idx * params.ranks_per_node + params.rank_in_node, rails.wait_ns[idx]);
  }
}

}  // namespace

cudaError_t launch_wait_times(const WaitTimesParams& params, cudaStream_t stream) {
  return launch_kernel(wait_times_kernel, {1, kThreads, 0}, params, stream);
}

cudaError_t load_wait_times_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(wait_times_kernel));
}

}  // namespace ferry::cuda
