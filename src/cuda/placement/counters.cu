/// Adds the counts of a route to the program's counters when hosts, not kernels, have exchanged the counts.

#include "cuda/driver/launch.hpp"
#include "cuda/placement/counters.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kCounterThreads = 256;

__global__ void __launch_bounds__(kCounterThreads) counters_kernel(const __grid_constant__ CountersParams params) {
  add_to_counters(
      params.counters, params.placement, params.num_experts, params.num_local_experts,
      [&params](int expert) { return params.own_counts[expert]; },
      [&params](int local) { return params.rows_per_expert[local]; }, [&params] { return params.num_homeless; });
}

}  // namespace

cudaError_t launch_counters(const CountersParams& params, cudaStream_t stream) {
  return launch_kernel(counters_kernel, {1, kCounterThreads, 0}, params, stream);
}

cudaError_t load_counters_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(counters_kernel));
}

}  // namespace ferry::cuda
