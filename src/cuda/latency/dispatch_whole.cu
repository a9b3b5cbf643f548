/// latency_dispatch in one kernel: every block makes its part of the send half, then its part of the receive half. All
/// blocks must run at once: there is at most one for each multiprocessor of the rank.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/codec_kernels.hpp"
#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/dispatch_send.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

/// Of the send half; the receive half's follows, so that it can be prepared before.
FERRY_HOST_DEVICE constexpr std::size_t send_bytes(int num_experts) {
  return (DispatchSendShared::size_bytes(num_experts) + plan::kPartAlignment - 1) / plan::kPartAlignment *
         plan::kPartAlignment;
}

/// The block that grants the set that is owed: one that does not receive, if there is one.
__device__ unsigned granting_block(const DispatchReceiveRows& params) {
  return params.first_receiver > 1 ? 1 : gridDim.x - 1;
}

/// `kHomes`: see receive_dispatch().
template <Codec kCodec, bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_kernel(const __grid_constant__ LatencyDispatchParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  auto& send = *reinterpret_cast<DispatchSendShared*>(dynamic_shared());
  const ReceiveMemory memory =
      ReceiveMemory::at(dynamic_shared() + send_bytes(call.num_experts), call.num_experts, call.num_local_experts);
  const bool receives = takes_part(params.receive);
  HomesLook homes;
  if (receives) homes = HomesLook(call, params.receive);
  const auto meanwhile = [&call, &params, &memory, &homes, receives] {
    if (receives) prepare_receive(call, params.receive, homes, memory.experts, *memory.shared);
  };
  const auto on_turn = [&call, &params] {
    const bool enters = !reports() && blockIdx.x != granting_block(params.receive);
    if (enters && threadIdx.x + 1 == kDispatchThreads) enter_whole_call(call, LatencyKind::kDispatch);
  };
  send_dispatch<kCodec, kHomes>(params.send, send, meanwhile,
                                on_turn);  // its barriers are also that of the preparation
  if (send.number == 0) return;
  // The last warp has nothing to do until the first one has told the peers of this block's rows.
  const bool last_warp = threadIdx.x >= kDispatchThreads - kWarpLanes;
  if (blockIdx.x == granting_block(params.receive) && last_warp) {
    grant_owed_set(call, LatencyKind::kDispatch, send.number);
    if (lane_idx() == 0) enter_whole_call(call, LatencyKind::kDispatch);
  }
  if (!receives) return;
  const SentCall sent{send.number, static_cast<std::uint32_t>(send.sets[call.ranks.rank]), 1, 0};
  if (!receive_dispatch<kHomes>(call, params.receive, sent, memory.experts, *memory.shared)) return;
  if (reports() && threadIdx.x == 0) leave_whole_call(call, LatencyKind::kDispatch, sent);
}

template <bool kHomes>
constexpr CodecKernels<LatencyDispatchParams> kKernels = {dispatch_kernel<Codec::kPlain, kHomes>,
                                                          dispatch_kernel<Codec::kFp8, kHomes>,
                                                          dispatch_kernel<Codec::kInt8, kHomes>};

std::size_t shared_bytes_of(int num_experts, int num_local_experts) {
  return send_bytes(num_experts) + ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes;
}

}  // namespace

cudaError_t launch_latency_dispatch(const LatencyDispatchParams& params, cudaStream_t stream) {
  if (is_small(params)) return launch_small_dispatch(params, stream);
  const LatencyParams& call = params.send.call;
  const LaunchShape shape{static_cast<unsigned>(call.num_blocks), kDispatchThreads,
                          shared_bytes_of(call.num_experts, call.num_local_experts), call.overlaps};
  const auto& kernels = has_homes_or_counters(params.receive) ? kKernels<true> : kKernels<false>;
  return launch_kernel(kernels.of(params.send.quantize), shape, params, stream);
}

cudaError_t load_latency_dispatch_kernels() {
  constexpr int kExperts = static_cast<int>(kMaxExperts);
  const std::size_t most_shared_bytes = shared_bytes_of(kExperts, kExperts);
  const cudaError_t error = kKernels<false>.load(most_shared_bytes);
  return error == cudaSuccess ? kKernels<true>.load(most_shared_bytes) : error;
}

}  // namespace ferry::cuda
