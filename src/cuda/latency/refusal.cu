/// A rank that cannot make a call of latency mode: its peers learn of it where they wait for its header. Its program
/// knows already. The call's number goes by on all ranks alike, and its set here, if it has one.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/refusal.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

__global__ void __launch_bounds__(kRefusalThreads) refusal_kernel(const __grid_constant__ LatencyRefusalParams params) {
  auto& shared = *reinterpret_cast<RefusalShared*>(dynamic_shared());
  const LatencyParams& call = params.call;
  if (warp_idx() == 0) {
    const std::uint64_t number = turn_number(call, params.kind);
    grant_owed_set(call, params.kind, number);
    send_refusal(params, number, own_set(params, number), shared);
  }
  __syncthreads();
  const bool free = receive_refusal(params, shared);
  if (free && warp_idx() == 0) grant_set(call, params.kind, shared.number, shared.set);
}

}  // namespace

cudaError_t launch_latency_refusal(const LatencyRefusalParams& params, cudaStream_t stream) {
  return launch_kernel(refusal_kernel, {1, kRefusalThreads, sizeof(RefusalShared)}, params, stream);
}

cudaError_t load_latency_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(refusal_kernel));
  if (error == cudaSuccess) error = load_latency_dispatch_kernels();
  if (error == cudaSuccess) error = load_small_dispatch_kernels();
  if (error == cudaSuccess) error = load_dispatch_send_kernels();
  if (error == cudaSuccess) error = load_dispatch_receive_kernel();
  if (error == cudaSuccess) error = load_latency_combine_kernels();
  if (error == cudaSuccess) error = load_small_combine_kernels();
  if (error == cudaSuccess) error = load_combine_send_kernels();
  if (error == cudaSuccess) error = load_combine_receive_kernels();
  return error;
}

}  // namespace ferry::cuda
