/// The kernels of latency_dispatch: the whole call in one, also for few tokens, and each half. All blocks that wait for
/// other ranks must run at once, since they wait for each other through the peers: there is at most one such block for
/// each multiprocessor that Ferry may wait on. Those that only send come before them, and end by themselves.

#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/dispatch_send.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/lost_homes.cuh"
#include "cuda/latency/mask.cuh"
#include "cuda/latency/small_receive.cuh"
#include "cuda/latency/small_send.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

/// Shared memory of the send half where other memory follows: that of the receive half in a whole call, which is
/// prepared before.
FERRY_HOST_DEVICE constexpr std::size_t send_bytes(int num_experts) {
  return round_up_part(DispatchSendShared::size_bytes(num_experts));
}

/// Posts the words of absent ranks. All lanes of one warp, once the call's turn has come.
template <bool kHomes>
__device__ void stand_in_for_absent(const DispatchSendParams& params, std::uint64_t number, const int* sets) {
  const std::uint64_t hash = kHomes ? hash_of_homes(params.placement) : 0;
  post_for_absent(params.call, LatencyKind::kDispatch, number, sets[params.call.ranks.rank], hash);
}

/// Block that grants the owed set: one that does not receive, if there is one.
__device__ unsigned granting_block(const DispatchReceiveRows& params) {
  return params.first_receiver > 1 ? 1 : gridDim.x - 1;
}

/// Every block makes its part of the send half, then its part of the receive half. `kHomes`: see receive_dispatch().
template <Codec kCodec, bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_kernel(const __grid_constant__ LatencyDispatchParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  auto& send = *reinterpret_cast<DispatchSendShared*>(dynamic_shared());
  const ReceiveMemory memory =
      ReceiveMemory::at(dynamic_shared() + send_bytes(call.num_experts), call.num_experts, call.num_local_experts);
  const bool receives = takes_part(params.receive);
  // The last warp is idle until the first one has posted this block's row flags.
  const bool last_warp = threadIdx.x >= kDispatchThreads - kWarpLanes;
  const bool grants = last_warp && blockIdx.x == granting_block(params.receive);
  std::uint32_t num_absent = 0;
  if (grants) num_absent = load_num_absent(call);
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
                                on_turn);  // its barriers also end the preparation
  if (send.number == 0) return;
  if (grants) {
    grant_owed_set(call, LatencyKind::kDispatch, send.number);
    if (num_absent != 0) stand_in_for_absent<kHomes>(params.send, send.number, send.sets);
    if (lane_idx() == 0) enter_whole_call(call, LatencyKind::kDispatch);
  }
  if (!receives) return;
  const SentCall sent{send.number, static_cast<std::uint32_t>(send.sets[call.ranks.rank]), 1, 0};
  if (!receive_dispatch<kHomes>(call, params.receive, sent, memory.experts, *memory.shared)) return;
  if (reports() && threadIdx.x == 0) leave_whole_call(call, LatencyKind::kDispatch, sent);
}

/// Warp that grants the owed set before anything else, since all ranks may wait for the grant: in a block that mostly
/// only clears gaps.
__device__ bool grants() { return blockIdx.x + 1 == gridDim.x && warp_idx() + 1 == kReceiveWarps; }

/// Makes a whole call of a few tokens (small_parts.cuh).
template <Codec kCodec>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_small_kernel(const __grid_constant__ LatencyDispatchParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  auto& shared = *reinterpret_cast<SmallShared*>(dynamic_shared());
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared() + SmallShared::size_bytes(call.num_experts),
                                                 call.num_experts, call.num_local_experts);
  const bool tells_host = reports() && threadIdx.x == 0 && params.receive.host.result != nullptr;
  if (tells_host) store_relaxed_system(&params.receive.host.result->started, 1);
  std::uint32_t num_absent = 0;
  if (grants()) {
    const std::uint64_t number = turn_number(call, LatencyKind::kDispatch);
    num_absent = load_num_absent(call);
    grant_owed_set(call, LatencyKind::kDispatch, number);
  }
  SmallSender<kCodec> sender(params.send, shared, memory);
  if (!sender.begin()) return;
  if (num_absent != 0) stand_in_for_absent<false>(params.send, shared.number, shared.sets);
  if (!reports() && threadIdx.x + 1 == kDispatchThreads) enter_whole_call(call, LatencyKind::kDispatch);
  sender.send();
  if (!takes_part(params.receive)) return;
  SmallReceiver<> receiver(call, params.receive, shared, memory);
  receiver.receive();
}

/// Makes a send half. `kMasks`: in groups that mask lost ranks (mask.hpp).
template <Codec kCodec, bool kHomes, bool kMasks>
__device__ void make_send_half(const HalfParams<DispatchSendParams, kMasks>& params) {
  constexpr std::size_t kOwnBytes = own_params_bytes<DispatchSendParams>(kMasks);
  auto& own = own_send_params(params, dynamic_shared(), LatencyKind::kDispatch);
  auto& shared = *reinterpret_cast<DispatchSendShared*>(dynamic_shared() + kOwnBytes);
  const LatencyParams& call = own.call;
  std::uint32_t num_absent = 0;
  if (!kMasks && blockIdx.x == 0 && warp_idx() == 0) num_absent = load_num_absent(call);
  if constexpr (kMasks) {
    if (params.placement.homes.ranges != nullptr) {
      pick_homes_left(own, dynamic_shared() + kOwnBytes + send_bytes(call.num_experts));
    }
  }
  send_dispatch<kCodec, kHomes>(
      own, shared, [] {}, [] {});
  if (shared.number == 0 || warp_idx() != 0) return;
  if (blockIdx.x == 0) {
    grant_owed_set(call, LatencyKind::kDispatch, shared.number);
    if (num_absent != 0) stand_in_for_absent<kHomes>(params, shared.number, shared.sets);
  }
  if (lane_idx() != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kDispatch, shared.number);
}

/// Makes a receive half. `kHomes`: see receive_dispatch().
template <bool kHomes, bool kMasks>
__device__ void make_receive_half(const HalfParams<DispatchReceiveParams, kMasks>& params) {
  auto& own = own_receive_params(params, dynamic_shared());
  const LatencyParams& call = own.call;
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared() + own_params_bytes<DispatchReceiveParams>(kMasks),
                                                 call.num_experts, call.num_local_experts);
  prepare_receive(call, own, HomesLook(call, own), memory.experts, *memory.shared);
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // unchanged until all blocks have read it
  // A send half that found the group broken has not written these words.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks))) != 0) return;
  if (sent.pending == 0) {
    if (reports() && threadIdx.x == 0) report_not_sent(call);
    return;
  }
  if constexpr (!kMasks) {
    if (!reports() && threadIdx.x == 0) enter_receive_half(words);
  }
  if (!receive_dispatch<kHomes>(call, own, sent, memory.experts, *memory.shared)) return;
  if constexpr (!kMasks) {
    if (reports() && warp_idx() == 0) leave_receive_half(call, LatencyKind::kDispatch, words, sent);
    return;
  }
  if (!is_last_block(words.arrivals)) return;
  if constexpr (kMasks) {
    clear_lost_slots(call);
    look_at_window(params, own);
  }
  if (threadIdx.x == 0) {
    words.pending = 0;
    words.arrivals = 0;
  }
  if (warp_idx() == 0) grant_set(call, LatencyKind::kDispatch, sent.number, static_cast<int>(sent.set));
}

/// Makes the send half of a call of a few tokens.
template <Codec kCodec>
__device__ void make_small_send_half(const DispatchSendParams& params) {
  const LatencyParams& call = params.call;
  auto& shared = *reinterpret_cast<SmallShared*>(dynamic_shared());
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared() + SmallShared::size_bytes(call.num_experts),
                                                 call.num_experts, call.num_local_experts);
  // The last warp has the fewest counts to post.
  const bool grants = blockIdx.x == 0 && warp_idx() + 1 == kReceiveWarps;
  std::uint32_t num_absent = 0;
  if (grants) num_absent = load_num_absent(call);
  SmallSender<kCodec, true> sender(params, shared, memory);
  if (!sender.begin()) return;
  sender.send();
  if (grants) {
    grant_owed_set(call, LatencyKind::kDispatch, shared.number);
    if (num_absent != 0) stand_in_for_absent<false>(params, shared.number, shared.sets);
  }
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kDispatch, shared.number);
}

/// Makes the receive half of a call of a few tokens.
__device__ inline void make_small_receive_half(const DispatchReceiveParams& params) {
  const LatencyParams& call = params.call;
  auto& shared = *reinterpret_cast<SmallShared*>(dynamic_shared());
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared() + SmallShared::size_bytes(call.num_experts),
                                                 call.num_experts, call.num_local_experts);
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // unchanged until all blocks have read it
  if (!begin_small_receive(call, params, shared, memory, sent)) return;
  if (!reports() && threadIdx.x == 0) enter_receive_half(words);
  SmallReceiver<true> receiver(call, params, shared, memory);
  const bool good = receiver.receive();
  if (reports() && good && warp_idx() + 1 == kReceiveWarps) {
    leave_receive_half(call, LatencyKind::kDispatch, words, sent);
  }
}

/// Makes either half of a call of a few tokens (is_small_in_halves).
template <Codec kCodec>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_small_half_kernel(const __grid_constant__ EitherHalf<DispatchSendParams, DispatchReceiveParams> params) {
  await_kernel_before();
  if (params.receives) {
    make_small_receive_half(params.receive);
  } else {
    make_small_send_half<kCodec>(params.send);
  }
}

/// Parameters of either half.
template <bool kMasks>
using DispatchHalf = EitherHalf<HalfParams<DispatchSendParams, kMasks>, HalfParams<DispatchReceiveParams, kMasks>>;

/// Makes either half.
template <Codec kCodec, bool kHomes, bool kMasks>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_half_kernel(const __grid_constant__ DispatchHalf<kMasks> params) {
  await_kernel_before();
  if (params.receives) {
    make_receive_half<kHomes, kMasks>(params.receive);
  } else {
    make_send_half<kCodec, kHomes, kMasks>(params.send);
  }
}

std::size_t receive_bytes(int num_experts, int num_local_experts) {
  return ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes;
}

// Dynamic shared memory of each kernel.

std::size_t whole_bytes(const LatencyDispatchParams& params) {
  const LatencyParams& call = params.send.call;
  return send_bytes(call.num_experts) + receive_bytes(call.num_experts, call.num_local_experts);
}
std::size_t small_bytes(const LatencyDispatchParams& params) {
  const LatencyParams& call = params.send.call;
  return SmallShared::size_bytes(call.num_experts) + receive_bytes(call.num_experts, call.num_local_experts);
}
std::size_t small_half_bytes(const DispatchHalf<false>& params) {
  const LatencyParams& call = params.receives ? params.receive.call : params.send.call;
  return SmallShared::size_bytes(call.num_experts) + receive_bytes(call.num_experts, call.num_local_experts);
}
std::size_t masked_send_bytes(int num_ranks, int num_experts, int num_logical) {
  return own_params_bytes<DispatchSendParams>(true) + send_bytes(num_experts) +
         HomesLeft::size_bytes_for(num_ranks, num_logical, num_experts);
}
std::size_t masked_receive_bytes(int num_experts, int num_local_experts) {
  return own_params_bytes<DispatchReceiveParams>(true) + receive_bytes(num_experts, num_local_experts);
}
std::size_t half_bytes(const DispatchHalf<false>& params) {
  if (!params.receives) return DispatchSendShared::size_bytes(params.send.call.num_experts);
  const LatencyParams& call = params.receive.call;
  return receive_bytes(call.num_experts, call.num_local_experts);
}
std::size_t masked_half_bytes(const DispatchHalf<true>& params) {
  const LatencyParams& call = params.receives ? params.receive.call : params.send.call;
  if (params.receives) return masked_receive_bytes(call.num_experts, call.num_local_experts);
  return masked_send_bytes(call.ranks.num_ranks, call.num_experts, params.send.placement.homes.num_logical);
}

constexpr int kExperts = static_cast<int>(kMaxExperts);

// Largest dynamic shared memory of any launch.

std::size_t most_receive_bytes() { return receive_bytes(kExperts, kExperts); }
std::size_t most_whole_bytes() { return send_bytes(kExperts) + most_receive_bytes(); }
std::size_t most_small_bytes() {
  return SmallShared::size_bytes(kSmallExperts) + receive_bytes(kSmallExperts, kSmallExperts);
}
std::size_t most_half_bytes() { return std::max(DispatchSendShared::size_bytes(kExperts), most_receive_bytes()); }
std::size_t most_masked_half_bytes() {
  return std::max(masked_send_bytes(kMaxRanks, kExperts, kExperts), masked_receive_bytes(kExperts, kExperts));
}

/// Index in a row that has kernels for each codec, first without and then with homes.
int kernel_idx(Quantization mode, bool homes) { return (homes ? kNumCodecs : 0) + codec_idx(mode); }

constexpr KernelRow<LatencyDispatchParams, 2 * kNumCodecs> kWhole = {
    {dispatch_kernel<Codec::kPlain, false>, dispatch_kernel<Codec::kFp8, false>, dispatch_kernel<Codec::kInt8, false>,
     dispatch_kernel<Codec::kPlain, true>, dispatch_kernel<Codec::kFp8, true>, dispatch_kernel<Codec::kInt8, true>},
    kDispatchThreads,
    whole_bytes,
    most_whole_bytes};
constexpr KernelRow<LatencyDispatchParams, kNumCodecs> kSmall = {
    {dispatch_small_kernel<Codec::kPlain>, dispatch_small_kernel<Codec::kFp8>, dispatch_small_kernel<Codec::kInt8>},
    kDispatchThreads,
    small_bytes,
    most_small_bytes};
constexpr KernelRow<DispatchHalf<false>, 2 * kNumCodecs> kHalf = {
    {dispatch_half_kernel<Codec::kPlain, false, false>, dispatch_half_kernel<Codec::kFp8, false, false>,
     dispatch_half_kernel<Codec::kInt8, false, false>, dispatch_half_kernel<Codec::kPlain, true, false>,
     dispatch_half_kernel<Codec::kFp8, true, false>, dispatch_half_kernel<Codec::kInt8, true, false>},
    kDispatchThreads,
    half_bytes,
    most_half_bytes};
constexpr KernelRow<DispatchHalf<false>, kNumCodecs> kSmallHalf = {
    {dispatch_small_half_kernel<Codec::kPlain>, dispatch_small_half_kernel<Codec::kFp8>,
     dispatch_small_half_kernel<Codec::kInt8>},
    kDispatchThreads,
    small_half_bytes,
    most_small_bytes};
constexpr KernelRow<DispatchHalf<true>, kNumCodecs> kMaskedHalf = {
    {dispatch_half_kernel<Codec::kPlain, true, true>, dispatch_half_kernel<Codec::kFp8, true, true>,
     dispatch_half_kernel<Codec::kInt8, true, true>},
    kDispatchThreads,
    masked_half_bytes,
    most_masked_half_bytes};

MaskGateParams gate_of(const LatencyParams& call, const MaskParams& mask, const PlacementTables& placement) {
  return {call, mask, LatencyKind::kDispatch, placement, false};
}

/// Units of a row, as in RowStep.
std::int64_t num_units(const DispatchSendParams& send) {
  return send.quantize == Quantization::kNone ? send.row.x_bytes / kUnitBytes : send.hidden / kLaneChannels;
}

}  // namespace

bool is_small(const LatencyDispatchParams& params) { return is_small_in_halves(params, params.send.call.num_blocks); }

bool is_small_in_halves(const LatencyDispatchParams& params, int num_receive_blocks) {
  const LatencyParams& call = params.send.call;
  const DispatchReceiveRows& receive = params.receive;
  const std::int64_t num_ranks = call.ranks.num_ranks;
  if (call.max_tokens > kSmallTokens || num_ranks > kSmallRanks || call.num_experts > kSmallExperts ||
      call.num_tokens * call.num_topk > kSmallEntries || num_units(params.send) > kStepUnits || receive.zero_padding ||
      has_homes_or_counters(receive)) {
    return false;
  }
  const std::int64_t num_receivers = num_receive_blocks - receive.first_receiver - receive.num_gap_blocks;
  const std::int64_t tokens_per_block = kReceiveWarps / receive.warps_per_row;
  return params.send.num_senders >= call.num_tokens && num_receivers / num_ranks * tokens_per_block >= call.max_tokens;
}

cudaError_t launch_latency_dispatch(const LatencyDispatchParams& params, int num_receive_blocks, const MaskParams& mask,
                                    cudaStream_t stream) {
  const LatencyParams& call = params.send.call;
  if (mask.present()) {
    const cudaError_t error = launch_dispatch_send(params, mask, stream);
    if (error != cudaSuccess) return error;
    DispatchReceiveParams receive{params.receive, call, params.send.quantize};
    receive.call.num_blocks = num_receive_blocks;
    return launch_dispatch_receive(receive, mask, stream);
  }
  const Quantization mode = params.send.quantize;
  if (is_small(params)) return kSmall.launch(codec_idx(mode), call.num_blocks, call.overlaps, params, stream);
  const int idx = kernel_idx(mode, has_homes_or_counters(params.receive));
  return kWhole.launch(idx, call.num_blocks, call.overlaps, params, stream);
}

cudaError_t launch_dispatch_send(const LatencyDispatchParams& params, const MaskParams& mask, cudaStream_t stream) {
  const DispatchSendParams& send = params.send;
  const LatencyParams& call = send.call;
  if (call.small) {
    return kSmallHalf.launch(codec_idx(send.quantize), call.num_blocks, call.overlaps, DispatchHalf<false>(send),
                             stream);
  }
  if (!mask.present()) {
    const int idx = kernel_idx(send.quantize, has_homes_or_counters(params.receive));
    return kHalf.launch(idx, call.num_blocks, call.overlaps, DispatchHalf<false>(send), stream);
  }
  const cudaError_t error = launch_grants_gate(gate_of(call, mask, send.placement), stream);
  if (error != cudaSuccess) return error;
  const Masked<DispatchSendParams> masked{send, mask};
  return kMaskedHalf.launch(codec_idx(send.quantize), call.num_blocks, false, DispatchHalf<true>(masked), stream);
}

cudaError_t launch_dispatch_receive(const DispatchReceiveParams& params, const MaskParams& mask, cudaStream_t stream) {
  const LatencyParams& call = params.call;
  if (call.small) {
    return kSmallHalf.launch(codec_idx(params.quantize), call.num_blocks, call.overlaps, DispatchHalf<false>(params),
                             stream);
  }
  if (!mask.present()) {
    const int idx = kernel_idx(params.quantize, has_homes_or_counters(params));
    return kHalf.launch(idx, call.num_blocks, call.overlaps, DispatchHalf<false>(params), stream);
  }
  const cudaError_t error = launch_arrivals_gate(gate_of(call, mask, params.placement), stream);
  if (error != cudaSuccess) return error;
  const Masked<DispatchReceiveParams> masked{params, mask};
  return kMaskedHalf.launch(codec_idx(params.quantize), call.num_blocks, false, DispatchHalf<true>(masked), stream);
}

cudaError_t load_latency_dispatch(bool masks) {
  const cudaError_t error = load_rows(kWhole, kSmall, kHalf, kSmallHalf);
  return error == cudaSuccess && masks ? load_rows(kMaskedHalf) : error;
}

}  // namespace ferry::cuda
