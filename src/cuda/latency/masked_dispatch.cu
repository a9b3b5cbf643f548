/// The halves of latency_dispatch in groups that mask lost ranks: see mask.hpp.

#include "cuda/driver/launch.hpp"
#include "cuda/latency/codec_kernels.hpp"
#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/dispatch_send.cuh"
#include "cuda/latency/mask.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/carver.hpp"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

using SendParams = Masked<DispatchSendParams>;
using ReceiveParams = Masked<DispatchReceiveParams>;

/// What comes before in shared memory, in multiples of its alignment.
FERRY_HOST_DEVICE constexpr std::size_t round_up_part(std::size_t bytes) {
  return (bytes + plan::kPartAlignment - 1) / plan::kPartAlignment * plan::kPartAlignment;
}

/// The homes that a rank's tokens pick from, without those on ranks that it masks, in a block's shared memory. Masks do
/// not change while a half runs, so all blocks pick the same.
struct HomesLeft {
  bool* is_masked;          ///< [R]
  plan::HomeRange* ranges;  ///< [E], each where it is in the call's table
  std::int32_t* homes;      ///< [P]
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static HomesLeft at(std::byte* base, int num_ranks, int num_logical, int num_physical) {
    plan::Carver carver(base);
    HomesLeft left{};
    left.is_masked = carver.take<bool>(static_cast<std::size_t>(num_ranks));
    left.ranges = carver.take<plan::HomeRange>(static_cast<std::size_t>(num_logical));
    left.homes = carver.take<std::int32_t>(static_cast<std::size_t>(num_physical));
    left.size_bytes = carver.used_bytes();
    return left;
  }
};

/// Makes the tokens pick from them (plan::without_lost_homes). All threads; `own` is in shared memory.
__device__ __noinline__ void pick_homes_left(SendParams& own, std::byte* memory) {
  const LatencyParams& call = own.call;
  const PlacementTables& placement = own.placement;
  const HomeTables table = placement.homes;
  const HomesLeft left = HomesLeft::at(memory, call.ranks.num_ranks, table.num_logical, call.num_experts);
  bool any = false;
  for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks.num_ranks; rank += kDispatchThreads) {
    left.is_masked[rank] = is_masked(own.mask, rank);
    any = any || left.is_masked[rank];
  }
  if (__syncthreads_or(static_cast<int>(any)) == 0) return;
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < table.num_logical; expert += kDispatchThreads) {
    plan::HomeRange range = table.ranges[expert];
    std::uint32_t num_left = 0;
    for (std::uint32_t i = 0; i < range.count; ++i) {
      const std::int32_t home = table.homes[range.first + i];
      if (!left.is_masked[placement.owner[home]]) left.homes[range.first + num_left++] = home;
    }
    for (std::uint32_t i = 0; num_left == 0 && i < range.count; ++i) {
      left.homes[range.first + i] = table.homes[range.first + i];
    }
    if (num_left != 0) range.count = num_left;
    left.ranges[expert] = range;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    own.placement.homes.ranges = left.ranges;
    own.placement.homes.homes = left.homes;
  }
  __syncthreads();
}

template <Codec kCodec>
__global__ void __launch_bounds__(kDispatchThreads, 1) masked_send_kernel(const __grid_constant__ SendParams params) {
  SendParams& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow_grants(params, own, LatencyKind::kDispatch);
  auto& shared = *reinterpret_cast<DispatchSendShared*>(dynamic_shared() + round_up_part(sizeof(SendParams)));
  const LatencyParams& call = own.call;
  if (params.placement.homes.ranges != nullptr) {
    pick_homes_left(own, dynamic_shared() + round_up_part(sizeof(SendParams)) +
                             round_up_part(DispatchSendShared::size_bytes(call.num_experts)));
  }
  send_dispatch<kCodec, true>(
      own, shared, [] {}, [] {});
  if (shared.number == 0 || threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.dispatch = {shared.number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kDispatch, shared.number);
}

/// Entries of masked ranks have no slots. All threads of a block.
__device__ void clear_lost_slots(const LatencyParams& call) {
  const std::int64_t num_entries = call.num_tokens * call.num_topk;
#pragma unroll 1
  for (std::int64_t i = threadIdx.x; i < num_entries; i += kDispatchThreads) {
    if (call.tables.homes[i] < -1) call.tables.slots[i] = -1;
  }
}

__global__ void __launch_bounds__(kDispatchThreads, 1)
    masked_receive_kernel(const __grid_constant__ ReceiveParams params) {
  ReceiveParams& own = copy_without_masked(params, dynamic_shared());
  look_at_shadow(params, own);
  const LatencyParams& call = own.call;
  const ReceiveMemory memory = ReceiveMemory::at(dynamic_shared() + round_up_part(sizeof(ReceiveParams)),
                                                 call.num_experts, call.num_local_experts);
  prepare_receive(call, own, HomesLook(call, own), memory.experts, *memory.shared);
  // A send half that found the group broken has not written what follows.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks))) != 0) return;
  SentCall& words = *call.tables.dispatch;
  const volatile SentCall& seen = words;
  const SentCall sent{seen.number, seen.set, seen.pending, 0};  // until all blocks are done it stays as it is
  if (sent.pending == 0) {
    if (reports() && threadIdx.x == 0) report_not_sent(call);
    return;
  }
  if (!receive_dispatch<true>(call, own, sent, memory.experts, *memory.shared)) return;
  if (!is_last_block(words.arrivals)) return;
  clear_lost_slots(call);
  look_at_window(params, own);
  if (threadIdx.x == 0) {
    words.pending = 0;
    words.arrivals = 0;
  }
  if (warp_idx() == 0) grant_set(call, LatencyKind::kDispatch, sent.number, static_cast<int>(sent.set));
}

constexpr CodecKernels<SendParams> kSendKernels = {masked_send_kernel<Codec::kPlain>, masked_send_kernel<Codec::kFp8>,
                                                   masked_send_kernel<Codec::kInt8>};

/// `num_logical` 0: experts have one home each.
std::size_t send_shared_bytes(int num_ranks, int num_experts, int num_logical) {
  const std::size_t homes_bytes = HomesLeft::at(nullptr, num_ranks, num_logical, num_experts).size_bytes;
  return round_up_part(sizeof(SendParams)) + round_up_part(DispatchSendShared::size_bytes(num_experts)) +
         (num_logical == 0 ? 0 : homes_bytes);
}

std::size_t receive_shared_bytes(int num_experts, int num_local_experts) {
  return round_up_part(sizeof(ReceiveParams)) + ReceiveMemory::at(nullptr, num_experts, num_local_experts).size_bytes;
}

MaskGateParams gate_of(const LatencyParams& call, const MaskParams& mask, const PlacementTables& placement) {
  MaskGateParams gate;
  gate.call = call;
  gate.mask = mask;
  gate.kind = LatencyKind::kDispatch;
  gate.placement = placement;
  return gate;
}

}  // namespace

cudaError_t launch_masked_dispatch_send(const SendParams& params, cudaStream_t stream) {
  const LatencyParams& call = params.call;
  const cudaError_t error = launch_grants_gate(gate_of(call, params.mask, params.placement), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{
      static_cast<unsigned>(call.num_blocks), kDispatchThreads,
      send_shared_bytes(call.ranks.num_ranks, call.num_experts, params.placement.homes.num_logical)};
  return launch_kernel(kSendKernels.of(params.quantize), shape, params, stream);
}

cudaError_t launch_masked_dispatch_receive(const ReceiveParams& params, cudaStream_t stream) {
  const LatencyParams& call = params.call;
  const cudaError_t error = launch_arrivals_gate(gate_of(call, params.mask, params.placement), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{static_cast<unsigned>(call.num_blocks), kDispatchThreads,
                          receive_shared_bytes(call.num_experts, call.num_local_experts)};
  return launch_kernel(masked_receive_kernel, shape, params, stream);
}

cudaError_t load_masked_dispatch_kernels() {
  constexpr int kExperts = static_cast<int>(kMaxExperts);
  const cudaError_t error = kSendKernels.load(send_shared_bytes(kMaxRanks, kExperts, kExperts));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(masked_receive_kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(receive_shared_bytes(kExperts, kExperts)));
}

}  // namespace ferry::cuda
