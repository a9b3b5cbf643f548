/// The halves of a combine of latency mode in groups that mask lost ranks: see mask.hpp.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/combine_receive.cuh"
#include "cuda/latency/combine_send.cuh"
#include "cuda/latency/mask.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

using SendParams = Masked<CombineSendParams>;
using ReceiveParams = Masked<CombineReceiveParams>;

/// A block's copy of the parameters comes first in shared memory.
template <typename Params>
constexpr std::size_t kCopyBytes =
    (sizeof(Params) + plan::kPartAlignment - 1) / plan::kPartAlignment* plan::kPartAlignment;

/// What the sums need of this combine: all of it is sent before any rank waits for some of it.
__global__ void __launch_bounds__(kCombineThreads) weights_send_kernel(const __grid_constant__ SendParams params) {
  const CombineStart start = CombineStart::of(params.call);
  if (__syncthreads_or(static_cast<int>(is_broken(params.call.ranks) || !start.routed)) != 0) return;
  SendParams& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow_grants(params, own, LatencyKind::kCombine);
  const CombineSendShared shared =
      CombineSendShared::at(dynamic_shared() + kCopyBytes<SendParams>, own.call.ranks.num_ranks);
  take_turn(own, shared, true);
}

template <bool kFloat32>
__global__ void __launch_bounds__(kCombineThreads) masked_send_kernel(const __grid_constant__ SendParams params) {
  const CombineStart start = CombineStart::of(params.call);
  // All threads or none: others wait for them.
  if (__syncthreads_or(static_cast<int>(is_broken(params.call.ranks))) != 0) return;
  SendParams& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow_grants(params, own, LatencyKind::kCombine);
  const LatencyParams& call = own.call;
  const CombineSendShared shared =
      CombineSendShared::at(dynamic_shared() + kCopyBytes<SendParams>, call.ranks.num_ranks);
  if (!send_combine<kFloat32, false>(own, shared, start) || threadIdx.x != 0) return;
  const std::uint64_t number = *shared.number;
  if (blockIdx.x == 0) {
    *call.tables.combine = {number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kCombine, number);
}

template <bool kFloat32>
__global__ void __launch_bounds__(kCombineThreads) masked_receive_kernel(const __grid_constant__ ReceiveParams params) {
  const CombineStart start = CombineStart::of(params.call);
  const volatile SentCall& pending = *params.call.tables.combine;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  // All threads or none: others wait for them.
  if (__syncthreads_or(static_cast<int>(is_broken(params.call.ranks) || sent.pending == 0)) != 0) return;
  ReceiveParams& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow(params, own);
  const LatencyParams& call = own.call;
  const CombineReceiveShared shared =
      CombineReceiveShared::at(dynamic_shared() + kCopyBytes<ReceiveParams>, call.ranks.num_ranks);
  if (!receive_combine<kFloat32, true>(call, own, sent, shared, start.routed)) return;
  if (!is_last_block(call.tables.combine->arrivals)) return;
  look_at_window(params, own);
  if (threadIdx.x == 0) *call.tables.combine = {};
  if (warp_idx() == 0) grant_set(call, LatencyKind::kCombine, sent.number, static_cast<int>(sent.set));
}

using SendKernel = void (*)(SendParams);
using ReceiveKernel = void (*)(ReceiveParams);
constexpr SendKernel kSendKernels[] = {masked_send_kernel<false>, masked_send_kernel<true>};
constexpr ReceiveKernel kReceiveKernels[] = {masked_receive_kernel<false>, masked_receive_kernel<true>};

template <typename Params>
MaskGateParams gate_of(const Params& params) {
  MaskGateParams gate;
  gate.call = params.call;
  gate.mask = params.mask;
  gate.kind = LatencyKind::kCombine;
  return gate;
}

}  // namespace

cudaError_t launch_masked_combine_send(const SendParams& params, cudaStream_t stream) {
  const MaskGateParams gate = gate_of(params);
  const LaunchShape shape{
      static_cast<unsigned>(params.call.num_blocks), static_cast<unsigned>(kCombineThreads),
      kCopyBytes<SendParams> + CombineSendShared::at(nullptr, params.call.ranks.num_ranks).size_bytes};
  cudaError_t error = launch_grants_gate(gate, stream);
  if (params.own_weights && params.rows.order == CombineOrder::kRankSums) {
    if (error == cudaSuccess) error = launch_kernel(weights_send_kernel, shape, params, stream);
    if (error == cudaSuccess) error = launch_weights_gate(gate, stream);
  }
  if (error != cudaSuccess) return error;
  return launch_kernel(kSendKernels[params.rows.float32 ? 1 : 0], shape, params, stream);
}

cudaError_t launch_masked_combine_receive(const ReceiveParams& params, cudaStream_t stream) {
  const cudaError_t error = launch_arrivals_gate(gate_of(params), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{
      static_cast<unsigned>(params.call.num_blocks), static_cast<unsigned>(kCombineThreads),
      kCopyBytes<ReceiveParams> + CombineReceiveShared::at(nullptr, params.call.ranks.num_ranks).size_bytes};
  return launch_kernel(kReceiveKernels[params.rows.float32 ? 1 : 0], shape, params, stream);
}

cudaError_t load_masked_combine_kernels() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(weights_send_kernel), reinterpret_cast<const void*>(kSendKernels[0]),
        reinterpret_cast<const void*>(kSendKernels[1]), reinterpret_cast<const void*>(kReceiveKernels[0]),
        reinterpret_cast<const void*>(kReceiveKernels[1])}) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
