/// The kernels of latency_dispatch in groups of several nodes: each half, as inside one node, with rows to and from far
/// ranks (far_send.cuh, far_receive.cuh). All blocks that wait for other ranks must run at once, as in dispatch.cu.

#include <algorithm>

#include "cuda/latency/far_receive.cuh"
#include "cuda/latency/far_send.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/small_nodes_receive.cuh"
#include "cuda/latency/small_nodes_send.cuh"
#include "cuda/latency/small_receive.cuh"
#include "cuda/latency/small_send.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

using NodesHalf = EitherHalf<FarDispatchParams, FarDispatchReceiveParams>;

// Shared memory of the halves inside a node; that for far ranks follows.

FERRY_HOST_DEVICE constexpr std::size_t near_send_bytes(int num_experts) {
  return round_up_part(DispatchSendShared::size_bytes(num_experts));
}
FERRY_HOST_DEVICE constexpr std::size_t near_receive_bytes(int num_experts, int num_local_experts) {
  return round_up_part(ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes);
}

/// Makes a send half.
template <Codec kCodec, bool kHomes>
__device__ void make_nodes_send_half(const FarDispatchParams& params) {
  const LatencyParams& call = params.call;
  auto& shared = *reinterpret_cast<DispatchSendShared*>(dynamic_shared());
  auto& targets = *reinterpret_cast<FarTargets*>(dynamic_shared() + near_send_bytes(call.num_experts));
  const FarSender<kHomes> far(params, shared, targets);
  DispatchSender<kCodec, kHomes, FarSender<kHomes>> sender(params, shared, far);
  const auto publish = [&params, &call] {
    // While the first warp waits.
    if (blockIdx.x == 0 && warp_idx() == 1) begin_far_grants(call, params.far, LatencyKind::kDispatch);
  };
  sender.send_all(publish, [] {});
  if (shared.number == 0) return;
  if (blockIdx.x == 0) {
    clear_next_places(params.far, shared.number, static_cast<int>(threadIdx.x), kDispatchThreads);
    __syncthreads();  // other blocks have had a barrier behind their last token
    if (warp_idx() == kPostingWarp) far.post_all();
  } else if (warp_idx() == kPostingWarp) {
    report_block(params.far, LatencyKind::kDispatch, static_cast<int>(blockIdx.x) - 1, shared.number);
  }
  if (blockIdx.x == 0 && warp_idx() == 0) {
    grant_far_owed_set(call, params.far, LatencyKind::kDispatch, shared.number);
  }
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kDispatch, shared.number);
}

/// Makes a receive half.
template <bool kHomes>
__device__ void make_nodes_receive_half(const FarDispatchReceiveParams& params) {
  const LatencyParams& call = params.call;
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared(), call.num_experts, call.num_local_experts);
  std::byte* const far_memory = dynamic_shared() + near_receive_bytes(call.num_experts, call.num_local_experts);
  auto& imports = *reinterpret_cast<FarImportShared*>(far_memory);
  const CheckedExpertTables experts{memory.experts,
                                    reinterpret_cast<std::int32_t*>(far_memory + sizeof(FarImportShared))};
  if (reports() && warp_idx() == 1) publish_grants(call, params.far);
  prepare_receive(call, params, HomesLook(call, params), memory.experts, *memory.shared);
  // A send half that found the group broken has not written the words that follow.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks))) != 0) return;
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // unchanged until all blocks are done
  if (sent.pending == 0) {
    if (reports() && threadIdx.x == 0) report_not_sent(call);
    return;
  }
  if (is_importer(params)) {
    const FarImporter importer(params, sent, imports);
    if (!importer.import_all()) return;
  }
  if (takes_part(params) && !receive_dispatch<kHomes>(call, params, sent, experts, *memory.shared)) return;
  if (!is_last_block(words.arrivals)) return;
  if (threadIdx.x == 0) {
    words.pending = 0;
    words.arrivals = 0;
  }
  if (warp_idx() != 0) return;
  leave_far_set(call, params.far, LatencyKind::kDispatch, sent);
}

/// Memory of the receive half of a call of a few tokens; that for far ranks follows.
__device__ ReceiveMemory small_memory(const LatencyParams& call) {
  return ReceiveMemory::at(dynamic_shared() + SmallShared::size_bytes(call.num_experts), call.num_experts,
                           call.num_local_experts);
}
FERRY_HOST_DEVICE constexpr std::size_t small_near_bytes(int num_experts, int num_local_experts) {
  return round_up_part(SmallShared::size_bytes(num_experts) +
                       ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes);
}

/// Grants the owed set, and tells far ranks. The last block of the send half, which does nothing else: the kernel
/// behind this one waits for its end.
__device__ inline void keep_small_books(const FarDispatchParams& params) {
  const LatencyParams& call = params.call;
  const TurnLook turn(call, LatencyKind::kDispatch);
  if (__syncthreads_or(static_cast<int>(turn.broken)) != 0) return;  // all warps have read the number
  if (warp_idx() != 0) return;
  grant_far_owed_set(call, params.far, LatencyKind::kDispatch, turn.number);
  clear_next_places(params.far, turn.number, lane_idx(), kWarpLanes);
  if (lane_idx() == 0) end_turn(call, LatencyKind::kDispatch, turn.number);
}

/// Makes the send half of a call of a few tokens (small_parts.cuh).
template <Codec kCodec>
__device__ void make_small_send_half(const FarDispatchParams& params) {
  const LatencyParams& call = params.call;
  auto& shared = *reinterpret_cast<SmallShared*>(dynamic_shared());
  auto& far_shared =
      *reinterpret_cast<SmallFarShared*>(dynamic_shared() + small_near_bytes(call.num_experts, call.num_local_experts));
  const ReceiveMemory memory = small_memory(call);
  if (blockIdx.x + 1 == gridDim.x) {
    keep_small_books(params);
    return;
  }
  // For the header, while the first warp waits. The last warp has the fewest counts.
  if (blockIdx.x == 0 && warp_idx() + 1 == kReceiveWarps) {
    begin_far_grants(call, params.far, LatencyKind::kDispatch);
  }
  const SmallFarSender far(params, shared, far_shared);
  SmallSender<kCodec, true, SmallFarSender> sender(params, shared, memory, far);
  if (!sender.begin()) return;
  sender.send();
  if (blockIdx.x == 0) __syncthreads();  // other blocks have had a barrier behind their row
  if (warp_idx() == kPostingWarp) post_small(params.far, shared.number);
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kDispatch, shared.number);
}

/// Makes the receive half of a call of a few tokens.
__device__ inline void make_small_receive_half(const FarDispatchReceiveParams& params) {
  const LatencyParams& call = params.call;
  auto& shared = *reinterpret_cast<SmallShared*>(dynamic_shared());
  auto& received = *reinterpret_cast<SmallFarReceived*>(dynamic_shared() +
                                                        small_near_bytes(call.num_experts, call.num_local_experts));
  const ReceiveMemory memory = small_memory(call);
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // unchanged until all blocks are done
  if (reports() && warp_idx() == 1) publish_grants(call, params.far);
  if (threadIdx.x == 0) received.num_headers = 0;
  if (!begin_small_receive(call, params, shared, memory, sent)) return;
  const bool clears = clears_far_set(params.far, LatencyKind::kDispatch, sent);
  if (!clears && !reports() && threadIdx.x == 0) enter_receive_half(words);
  const SmallFarReceiver far(params, sent, received);
  SmallReceiver<true, SmallFarReceiver> receiver(call, params, shared, memory, far);
  if (!receiver.receive()) return;
  leave_small_far_half(call, params.far, LatencyKind::kDispatch, words, sent, clears);
}

/// Makes either half of a call of a few tokens (is_small_over_nodes).
template <Codec kCodec>
__global__ void __launch_bounds__(kDispatchThreads, 1)
    dispatch_nodes_small_kernel(const __grid_constant__ NodesHalf params) {
  await_kernel_before();
  if (params.receives) {
    make_small_receive_half(params.receive);
  } else {
    make_small_send_half<kCodec>(params.send);
  }
}

/// Makes either half.
template <Codec kCodec, bool kHomes>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_nodes_kernel(const __grid_constant__ NodesHalf params) {
  await_kernel_before();
  if (params.receives) {
    make_nodes_receive_half<kHomes>(params.receive);
  } else {
    make_nodes_send_half<kCodec, kHomes>(params.send);
  }
}

/// `row_bytes`: of a row that is stored here before it becomes words.
std::size_t send_bytes(int num_experts, std::int64_t row_bytes) {
  return near_send_bytes(num_experts) + FarTargets::size_bytes(row_bytes);
}
std::size_t receive_bytes(int num_experts, int num_local_experts) {
  return near_receive_bytes(num_experts, num_local_experts) + sizeof(FarImportShared) +
         to_size(num_experts) * sizeof(std::int32_t);
}
std::size_t half_bytes(const NodesHalf& params) {
  if (!params.receives) {
    const std::int64_t row_bytes = params.send.row.stride();
    const bool may_be_words = far_word_stride(params.send.far.layout, row_bytes, 0) != 0 &&
                              (params.send.num_tokens_view != nullptr || params.send.call.num_tokens <= kFarWordTokens);
    return send_bytes(params.send.call.num_experts, may_be_words ? row_bytes : 0);
  }
  return receive_bytes(params.receive.call.num_experts, params.receive.call.num_local_experts);
}
std::size_t most_half_bytes() {
  constexpr int kExperts = static_cast<int>(kMaxExperts);
  return std::max(send_bytes(kExperts, kMostFarWordRow), receive_bytes(kExperts, kExperts));
}

std::size_t small_half_bytes(const NodesHalf& params) {
  const LatencyParams& call = params.receives ? params.receive.call : params.send.call;
  const std::size_t far_bytes = params.receives ? SmallFarReceived::size_bytes(call.num_experts)
                                                : SmallFarShared::size_bytes(params.send.row.stride());
  return small_near_bytes(call.num_experts, call.num_local_experts) + far_bytes;
}
std::size_t most_small_half_bytes() {
  return small_near_bytes(kSmallExperts, kSmallExperts) +
         std::max(SmallFarReceived::size_bytes(kSmallExperts), SmallFarShared::size_bytes(kMostFarWordRow));
}

constexpr KernelRow<NodesHalf, kNumCodecs> kSmallHalf = {
    {dispatch_nodes_small_kernel<Codec::kPlain>, dispatch_nodes_small_kernel<Codec::kFp8>,
     dispatch_nodes_small_kernel<Codec::kInt8>},
    kDispatchThreads,
    small_half_bytes,
    most_small_half_bytes};
constexpr KernelRow<NodesHalf, 2 * kNumCodecs> kHalf = {
    {dispatch_nodes_kernel<Codec::kPlain, false>, dispatch_nodes_kernel<Codec::kFp8, false>,
     dispatch_nodes_kernel<Codec::kInt8, false>, dispatch_nodes_kernel<Codec::kPlain, true>,
     dispatch_nodes_kernel<Codec::kFp8, true>, dispatch_nodes_kernel<Codec::kInt8, true>},
    kDispatchThreads,
    half_bytes,
    most_half_bytes};

int kernel_idx(Quantization mode, bool homes) { return (homes ? kNumCodecs : 0) + codec_idx(mode); }

}  // namespace

bool is_small_over_nodes(const LatencyDispatchParams& params, int num_receive_blocks, const FarLayout& layout) {
  const std::int64_t row_bytes = params.send.row.stride();
  return is_small_in_halves(params, num_receive_blocks) &&
         far_word_stride(layout, row_bytes, params.send.call.max_tokens) != 0;
}

cudaError_t launch_nodes_dispatch_send(const FarDispatchParams& params, bool homes, cudaStream_t stream) {
  if (params.call.small) {
    return kSmallHalf.launch(codec_idx(params.quantize), params.call.num_blocks, params.call.overlaps,
                             NodesHalf(params), stream);
  }
  const int idx = kernel_idx(params.quantize, homes);
  return kHalf.launch(idx, params.call.num_blocks, params.call.overlaps, NodesHalf(params), stream);
}

cudaError_t launch_nodes_dispatch_receive(const FarDispatchReceiveParams& params, cudaStream_t stream) {
  if (params.call.small) {
    return kSmallHalf.launch(codec_idx(params.quantize), params.call.num_blocks, params.call.overlaps,
                             NodesHalf(params), stream);
  }
  const int idx = kernel_idx(params.quantize, has_homes_or_counters(params));
  return kHalf.launch(idx, params.call.num_blocks, params.call.overlaps, NodesHalf(params), stream);
}

cudaError_t load_nodes_dispatch() { return load_rows(kHalf, kSmallHalf); }

}  // namespace ferry::cuda
