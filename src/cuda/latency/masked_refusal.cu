/// A call that this rank refuses, in groups that mask lost ranks: see mask.hpp.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/mask_gates.cuh"
#include "cuda/latency/refusal.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

using Params = Masked<LatencyRefusalParams>;

constexpr std::size_t kCopyBytes =
    (sizeof(Params) + plan::kPartAlignment - 1) / plan::kPartAlignment * plan::kPartAlignment;
constexpr std::size_t kSharedBytes = kCopyBytes + sizeof(RefusalShared);

__device__ RefusalShared& refusal_shared() { return *reinterpret_cast<RefusalShared*>(dynamic_shared() + kCopyBytes); }

__global__ void __launch_bounds__(kRefusalThreads) masked_refusal_send_kernel(const __grid_constant__ Params params) {
  RefusalShared& shared = refusal_shared();
  const std::uint64_t number = turn_number(params.call, params.kind);
  {
    const Params& own = copy_without_masked(params, dynamic_shared());
    if (warp_idx() == 0) {
      const int set = own_set(own, number);
      if (lane_idx() == 0) shared.set = set;
    }
  }
  __syncthreads();
  wait_for_grants(params.call, params.mask, params.kind, number);
  __syncthreads();
  // Once more: ranks may have been masked since.
  Params& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow_grants(params, own, params.kind);
  if (warp_idx() != 0) return;
  send_refusal(own, number, shared.set, shared);
  if (lane_idx() != 0) return;
  params.mask.state->refused[static_cast<int>(params.kind)] = {shared.number, static_cast<std::uint32_t>(shared.set),
                                                               shared.number != 0 ? 1U : 0U, 0};
}

__global__ void __launch_bounds__(kRefusalThreads)
    masked_refusal_receive_kernel(const __grid_constant__ Params params) {
  RefusalShared& shared = refusal_shared();
  Params& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow(params, own);
  SentCall& refused = params.mask.state->refused[static_cast<int>(params.kind)];
  if (threadIdx.x == 0) {
    shared.number = refused.pending != 0 ? refused.number : 0;
    shared.set = static_cast<int>(refused.set);
    refused.pending = 0;
  }
  __syncthreads();
  if (!receive_refusal(own, shared)) return;
  look_at_window(params, own);
  if (warp_idx() == 0) grant_set(own.call, params.kind, shared.number, shared.set);
}

}  // namespace

cudaError_t launch_masked_refusal(const Params& params, cudaStream_t stream) {
  const LaunchShape shape{1, kRefusalThreads, kSharedBytes};
  MaskGateParams gate;
  gate.call = params.call;
  gate.mask = params.mask;
  gate.kind = params.kind;
  gate.refuses = true;
  cudaError_t error = launch_kernel(masked_refusal_send_kernel, shape, params, stream);
  if (error == cudaSuccess) error = launch_arrivals_gate(gate, stream);
  if (error == cudaSuccess) error = launch_kernel(masked_refusal_receive_kernel, shape, params, stream);
  return error;
}

cudaError_t load_masked_refusal_kernels() {
  for (const void* kernel : {reinterpret_cast<const void*>(masked_refusal_send_kernel),
                             reinterpret_cast<const void*>(masked_refusal_receive_kernel)}) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
