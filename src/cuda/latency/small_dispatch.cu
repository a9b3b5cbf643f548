/// latency_dispatch of a few tokens in one kernel (small_parts.cuh): every block makes its part of the send half, then
/// its part of the receive half. All blocks must run at once, as in dispatch_whole.cu.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/codec_kernels.hpp"
#include "cuda/latency/small_receive.cuh"
#include "cuda/latency/small_send.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

/// The warp that grants the set that is owed, before anything else, since all may have to wait for that: of a block
/// that mostly only clears gaps.
__device__ bool grants() { return blockIdx.x + 1 == gridDim.x && warp_idx() + 1 == kReceiveWarps; }

template <Codec kCodec>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    small_dispatch_kernel(const __grid_constant__ LatencyDispatchParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  auto& shared = *reinterpret_cast<SmallShared*>(dynamic_shared());
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared() + SmallShared::size_bytes(call.num_experts),
                                                 call.num_experts, call.num_local_experts);
  const bool tells_host = reports() && threadIdx.x == 0 && params.receive.host.result != nullptr;
  if (tells_host) store_relaxed_system(&params.receive.host.result->started, 1);
  if (grants()) grant_owed_set(call, LatencyKind::kDispatch, turn_number(call, LatencyKind::kDispatch));
  SmallSender<kCodec> sender(params.send, shared, memory);
  if (!sender.begin()) return;
  if (!reports() && threadIdx.x + 1 == kDispatchThreads) enter_whole_call(call, LatencyKind::kDispatch);
  sender.send();
  if (!takes_part(params.receive)) return;
  SmallReceiver receiver(call, params.receive, shared, memory);
  receiver.receive();
}

constexpr CodecKernels<LatencyDispatchParams> kKernels = {
    small_dispatch_kernel<Codec::kPlain>, small_dispatch_kernel<Codec::kFp8>, small_dispatch_kernel<Codec::kInt8>};

std::size_t shared_bytes_of(int num_experts, int num_local_experts) {
  return SmallShared::size_bytes(num_experts) + ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes;
}

/// Units of a row as RowStep has them.
std::int64_t num_units(const DispatchSendParams& send) {
  return send.quantize == Quantization::kNone ? send.row.x_bytes / kUnitBytes : send.hidden / kLaneChannels;
}

}  // namespace

bool is_small(const LatencyDispatchParams& params) {
  const LatencyParams& call = params.send.call;
  const DispatchReceiveRows& receive = params.receive;
  const std::int64_t num_ranks = call.ranks.num_ranks;
  if (call.max_tokens > kSmallTokens || num_ranks > kSmallRanks || call.num_experts > kSmallExperts ||
      call.num_tokens * call.num_topk > kSmallEntries || num_units(params.send) > kStepUnits ||
      call.slab_capacity < num_ranks * call.max_tokens || receive.zero_padding || has_homes_or_counters(receive)) {
    return false;
  }
  const std::int64_t num_receivers = call.num_blocks - receive.first_receiver - receive.num_gap_blocks;
  const std::int64_t tokens_per_block = kReceiveWarps / receive.warps_per_row;
  return params.send.num_senders >= call.num_tokens && num_receivers / num_ranks * tokens_per_block >= call.max_tokens;
}

cudaError_t launch_small_dispatch(const LatencyDispatchParams& params, cudaStream_t stream) {
  const LatencyParams& call = params.send.call;
  const LaunchShape shape{static_cast<unsigned>(call.num_blocks), kDispatchThreads,
                          shared_bytes_of(call.num_experts, call.num_local_experts), call.overlaps};
  return launch_kernel(kKernels.of(params.send.quantize), shape, params, stream);
}

cudaError_t load_small_dispatch_kernels() { return kKernels.load(shared_bytes_of(kSmallExperts, kSmallExperts)); }

}  // namespace ferry::cuda
