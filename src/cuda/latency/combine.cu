/// The kernels of a combine of latency mode: the whole call in one, also for few tokens, and each half. All blocks that
/// wait for other ranks must run at once, as in dispatch.cu.

#include <algorithm>

#include "cuda/latency/combine_receive.cuh"
#include "cuda/latency/combine_send.cuh"
#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/mask.cuh"
#include "cuda/latency/small_combine.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/part_barrier.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

/// Every block makes its part of the send half, then its part of the receive half.
template <RowKind kKind, Receiving kReceiving>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ LatencyCombineParams params) {
  await_kernel_before();
  constexpr bool kWords = kReceiving == Receiving::kWords;
  const LatencyParams& call = params.send.call;
  const CombineStart start = CombineStart::of(call);
  const CombineSendShared send = CombineSendShared::at(dynamic_shared(), call.ranks.num_ranks);
  const CombineReceiveShared receive =
      CombineReceiveShared::at(dynamic_shared() + send.size_bytes, call.ranks.num_ranks);
  if (!send_combine<kKind, true, kWords>(params.send, send, start)) return;
  const SentCall sent{*send.number, static_cast<std::uint32_t>(send.sets[call.ranks.rank]), 1, 0};
  if (!receive_combine<kKind, kReceiving>(call, params.receive, sent, receive, start.routed)) return;
  if (is_clerk() && threadIdx.x == 0) leave_whole_call(call, LatencyKind::kCombine, sent);
}

/// Makes a whole call whose sums travel as words, between few ranks (small_combine.cuh). `kVectors`: of a step.
template <RowKind kKind, int kVectors>
__global__ void __launch_bounds__(kCombineThreads)
    combine_small_kernel(const __grid_constant__ SmallCombineParams params) {
  await_kernel_before();
  const LatencyParams& call = params.send.call;
  auto& shared = *reinterpret_cast<SmallCombineShared*>(dynamic_shared());
  if (is_clerk()) {
    if (warp_idx() == 0) announce_small(params, shared);
    if (warp_idx() == 1) keep_small_books(call);
    return;
  }
  if (warp_idx() == 0) {
    take_small_turn(call, shared);
    __syncthreads();
    if (lane_idx() == 0 && shared.number != 0) enter_whole_call(call, LatencyKind::kCombine);
    return;
  }
  SmallAdder<kKind, kVectors> adder(params, shared);
  const std::int32_t home = adder.load_home(first_combine_unit());  // needed only by receive()
  if (adder.send()) adder.receive(home);
}

/// Makes the send half of such a call.
template <RowKind kKind, int kVectors>
__device__ void make_small_send_half(const SmallCombineParams& params, SmallCombineShared& shared) {
  const LatencyParams& call = params.send.call;
  if (!is_clerk()) {
    if (warp_idx() != 0) {
      SmallAdder<kKind, kVectors>(params, shared).send();
      return;
    }
    take_small_turn(call, shared);
    __syncthreads();
    if (lane_idx() == 0 && shared.number != 0) end_turn(call, LatencyKind::kCombine, shared.number);
    return;
  }
  if (warp_idx() > 1) return;
  SentCall sent{};
  bool good = false;
  if (warp_idx() == 0) {
    announce_small(params, shared);
  } else {
    good = begin_small_books(call, sent);
  }
  meet_warps<2>();  // both have read the call's number
  if (!good || lane_idx() != 0) return;
  *call.tables.combine = sent;
  end_turn(call, LatencyKind::kCombine, sent.number);
}

/// Makes the receive half of such a call.
template <RowKind kKind, int kVectors>
__device__ void make_small_receive_half(const SmallCombineParams& params, SmallCombineShared& shared) {
  const LatencyParams& call = params.send.call;
  SentCall& words = *call.tables.combine;
  const volatile SentCall& pending = words;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  SmallAdder<kKind, kVectors> adder(params, shared);
  std::int32_t home = -1;
  if (!is_clerk() && warp_idx() != 0) home = adder.load_home(first_combine_unit());
  if (threadIdx.x == 0) {
    shared.number = sent.number;
    shared.sets[call.ranks.rank] = static_cast<int>(sent.set);
  }
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks) || sent.pending == 0)) != 0) return;
  if (warp_idx() != 0) {
    if (!is_clerk()) adder.receive(home);
    return;
  }
  if (!is_clerk()) {
    if (lane_idx() == 0) enter_receive_half(words);
    return;
  }
  const bool routed = call.tables.summary->valid != 0;
  if (close_small_books(call, sent, routed)) leave_receive_half(call, LatencyKind::kCombine, words, sent);
}

/// Makes either half of such a call.
template <RowKind kKind, int kVectors>
__global__ void __launch_bounds__(kCombineThreads)
    combine_small_half_kernel(const __grid_constant__ SmallCombineHalf params) {
  await_kernel_before();
  auto& shared = *reinterpret_cast<SmallCombineShared*>(dynamic_shared());
  if (params.receives) {
    make_small_receive_half<kKind, kVectors>(params, shared);
  } else {
    make_small_send_half<kKind, kVectors>(params, shared);
  }
}

/// Makes a send half. `kMasks`: in groups that mask lost ranks (mask.hpp), whose sums never travel as words.
template <RowKind kKind, bool kWords, bool kMasks>
__device__ void make_send_half(const HalfParams<CombineSendParams, kMasks>& params) {
  const CombineStart start = CombineStart::of(params.call);
  if constexpr (kMasks) {
    // All threads return or none, since the block has barriers later.
    if (__syncthreads_or(static_cast<int>(is_broken(params.call.ranks))) != 0) return;
  }
  auto& own = own_send_params(params, dynamic_shared(), LatencyKind::kCombine);
  const LatencyParams& call = own.call;
  const CombineSendShared shared =
      CombineSendShared::at(dynamic_shared() + own_params_bytes<CombineSendParams>(kMasks), call.ranks.num_ranks);
  if (!send_combine<kKind, false, kWords>(own, shared, start) || warp_idx() != 0) return;
  const std::uint64_t number = *shared.number;
  if (lane_idx() != 0) return;
  if (blockIdx.x == 0) {
    *call.tables.combine = {number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kCombine, number);
}

/// Sends the weights of this combine before its sums, in groups that mask ranks: all weights must be sent before any
/// rank waits for some.
__global__ void __launch_bounds__(kCombineThreads)
    weights_send_kernel(const __grid_constant__ Masked<CombineSendParams> params) {
  const CombineStart start = CombineStart::of(params.call);
  if (__syncthreads_or(static_cast<int>(is_broken(params.call.ranks) || !start.routed)) != 0) return;
  auto& own = own_send_params(params, dynamic_shared(), LatencyKind::kCombine);
  const CombineSendShared shared =
      CombineSendShared::at(dynamic_shared() + own_params_bytes<CombineSendParams>(true), own.call.ranks.num_ranks);
  take_turn(own, shared, true);
}

/// Makes a receive half.
template <RowKind kKind, bool kWords, bool kMasks>
__device__ void make_receive_half(const HalfParams<CombineReceiveParams, kMasks>& params) {
  const CombineStart start = CombineStart::of(params.call);
  const volatile SentCall& pending = *params.call.tables.combine;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  // All threads or none, as above.
  if (__syncthreads_or(static_cast<int>(is_broken(params.call.ranks) || sent.pending == 0)) != 0) return;
  auto& own = own_receive_params(params, dynamic_shared());
  const LatencyParams& call = own.call;
  const CombineReceiveShared shared =
      CombineReceiveShared::at(dynamic_shared() + own_params_bytes<CombineReceiveParams>(kMasks), call.ranks.num_ranks);
  constexpr Receiving kReceiving = kMasks ? Receiving::kMasks : kWords ? Receiving::kWords : Receiving::kRows;
  SentCall& words = *call.tables.combine;
  if constexpr (!kMasks) {
    if (!is_clerk() && threadIdx.x == 0) enter_receive_half(words);
  }
  const bool good = receive_combine<kKind, kReceiving>(call, own, sent, shared, start.routed);
  if constexpr (!kMasks) {
    if (is_clerk() && good && warp_idx() == 0) leave_receive_half(call, LatencyKind::kCombine, words, sent);
    return;
  }
  if (!good || !is_last_block(words.arrivals)) return;
  if constexpr (kMasks) look_at_window(params, own);
  if (threadIdx.x == 0) words = {};
  if (warp_idx() == 0) grant_set(call, LatencyKind::kCombine, sent.number, static_cast<int>(sent.set));
}

/// Parameters of either half.
template <bool kMasks>
using CombineHalf = EitherHalf<HalfParams<CombineSendParams, kMasks>, HalfParams<CombineReceiveParams, kMasks>>;

/// Makes either half.
template <RowKind kKind, bool kWords, bool kMasks>
__global__ void __launch_bounds__(kCombineThreads)
    combine_half_kernel(const __grid_constant__ CombineHalf<kMasks> params) {
  await_kernel_before();
  if (params.receives) {
    make_receive_half<kKind, kWords, kMasks>(params.receive);
  } else {
    make_send_half<kKind, kWords, kMasks>(params.send);
  }
}

// Dynamic shared memory of each kernel.

std::size_t send_bytes(const LatencyParams& call) {
  return CombineSendShared::at(nullptr, call.ranks.num_ranks).size_bytes;
}
std::size_t receive_bytes(const LatencyParams& call) {
  return CombineReceiveShared::at(nullptr, call.ranks.num_ranks).size_bytes;
}
std::size_t whole_bytes(const LatencyCombineParams& params) {
  return send_bytes(params.send.call) + receive_bytes(params.send.call);
}
std::size_t small_bytes(const SmallCombineParams& /*params*/) { return sizeof(SmallCombineShared); }
std::size_t small_half_bytes(const SmallCombineHalf& /*params*/) { return sizeof(SmallCombineShared); }
std::size_t half_bytes(const CombineHalf<false>& params) {
  return params.receives ? receive_bytes(params.receive.call) : send_bytes(params.send.call);
}
std::size_t weights_bytes(const Masked<CombineSendParams>& params) {
  return own_params_bytes<CombineSendParams>(true) + send_bytes(params.call);
}
std::size_t masked_half_bytes(const CombineHalf<true>& params) {
  if (!params.receives) return weights_bytes(params.send);
  return own_params_bytes<CombineReceiveParams>(true) + receive_bytes(params.receive.call);
}

/// Index in a row whose first kernels are those of rows that are no words, for each kind of rows. Masked halves have
/// only those. Behind them are those of bf16 and f32 as words.
int kernel_idx(const CombineRows& rows) { return (rows.words() ? kNumRowKinds : 0) + static_cast<int>(rows.kind); }

/// The same in the row of whole calls, whose last kernels are those with helpers.
int whole_idx(const LatencyCombineParams& params) {
  constexpr int kHelpers = kNumRowKinds + 2;
  const CombineRows& rows = params.send.rows;
  return params.receive.first_receiver > 1 ? kHelpers + static_cast<int>(rows.kind) : kernel_idx(rows);
}

constexpr RowKind kBfloat16 = RowKind::kBfloat16;
constexpr RowKind kFloat32 = RowKind::kFloat32;
constexpr RowKind kFp8Sums = RowKind::kFp8Sums;

constexpr KernelRow<LatencyCombineParams, 8> kWhole = {
    {combine_kernel<kBfloat16, Receiving::kRows>, combine_kernel<kFloat32, Receiving::kRows>,
     combine_kernel<kFp8Sums, Receiving::kRows>, combine_kernel<kBfloat16, Receiving::kWords>,
     combine_kernel<kFloat32, Receiving::kWords>, combine_kernel<kBfloat16, Receiving::kWithHelpers>,
     combine_kernel<kFloat32, Receiving::kWithHelpers>, combine_kernel<kFp8Sums, Receiving::kWithHelpers>},
    kCombineThreads,
    whole_bytes};
constexpr KernelRow<SmallCombineParams, 5> kSmall = {
    {combine_small_kernel<kBfloat16, kWordStepVectors>, combine_small_kernel<kFloat32, kWordStepVectors>,
     combine_small_kernel<kFp8Sums, kFp8StepVectors>, combine_small_kernel<kBfloat16, kShortWordStepVectors>,
     combine_small_kernel<kFloat32, kShortWordStepVectors>},
    kCombineThreads,
    small_bytes};
constexpr KernelRow<SmallCombineHalf, 5> kSmallHalf = {
    {combine_small_half_kernel<kBfloat16, kWordStepVectors>, combine_small_half_kernel<kFloat32, kWordStepVectors>,
     combine_small_half_kernel<kFp8Sums, kFp8StepVectors>, combine_small_half_kernel<kBfloat16, kShortWordStepVectors>,
     combine_small_half_kernel<kFloat32, kShortWordStepVectors>},
    kCombineThreads,
    small_half_bytes};
constexpr KernelRow<CombineHalf<false>, 5> kHalf = {
    {combine_half_kernel<kBfloat16, false, false>, combine_half_kernel<kFloat32, false, false>,
     combine_half_kernel<kFp8Sums, false, false>, combine_half_kernel<kBfloat16, true, false>,
     combine_half_kernel<kFloat32, true, false>},
    kCombineThreads,
    half_bytes};
constexpr KernelRow<Masked<CombineSendParams>> kMaskedWeights = {{weights_send_kernel}, kCombineThreads, weights_bytes};
constexpr KernelRow<CombineHalf<true>, kNumRowKinds> kMaskedHalf = {
    {combine_half_kernel<kBfloat16, false, true>, combine_half_kernel<kFloat32, false, true>,
     combine_half_kernel<kFp8Sums, false, true>},
    kCombineThreads,
    masked_half_bytes};

MaskGateParams gate_of(const LatencyParams& call, const MaskParams& mask) {
  return {call, mask, LatencyKind::kCombine, {}, false};
}

/// Small batches take more blocks rather than more warps per block: code that is new to a multiprocessor is slow to
/// fetch.
constexpr std::int64_t kUnitsPerBlock = 4;

/// The same in the rows of calls that are small.
int small_idx(const CombineRows& rows) {
  const bool is_short = rows.word_step_vectors == kShortWordStepVectors;
  return (is_short ? kNumRowKinds : 0) + static_cast<int>(rows.kind);
}

SmallCombineParams small_params(const LatencyCombineParams& params) {
  const LatencyParams& call = params.send.call;
  const int num_warps = (call.num_blocks - 1) * kCombineWarps;
  const int num_ranks = call.ranks.num_ranks;
  SmallCombineParams small;
  static_cast<LatencyCombineParams&>(small) = params;
  small.ranks = SmallDivisor::of(num_ranks);
  small.sends = SmallUnits::of(params.send.rows, static_cast<int>(call.max_tokens) * num_ranks, num_warps);
  small.receives = SmallUnits::of(params.send.rows, static_cast<int>(call.num_tokens), num_warps);
  return small;
}

}  // namespace

int combine_blocks(const LatencyParams& call, const CombineRows& rows, int num_sms) {
  const std::int64_t num_steps = (rows.row_bytes + RowParts::kStepBytes - 1) / RowParts::kStepBytes;
  const std::int64_t num_units = call.max_tokens * call.ranks.num_ranks * num_steps;
  const std::int64_t most = std::clamp(num_sms, 2, kMaxCallBlocks);
  return 1 + static_cast<int>(std::clamp<std::int64_t>((num_units + kUnitsPerBlock - 1) / kUnitsPerBlock, 1, most - 1));
}

bool is_small(const LatencyCombineParams& params) {
  return params.send.rows.words() && params.send.call.ranks.num_ranks <= kSmallRanks;
}

namespace {

/// Launches a half of a call that is_small().
cudaError_t launch_small_half(const LatencyCombineParams& params, bool receives, cudaStream_t stream) {
  const LatencyParams& call = params.send.call;
  SmallCombineHalf half;
  static_cast<SmallCombineParams&>(half) = small_params(params);
  half.receives = receives;
  return kSmallHalf.launch(small_idx(params.send.rows), call.num_blocks, call.overlaps, half, stream);
}

}  // namespace

cudaError_t launch_latency_combine(const LatencyCombineParams& params, const MaskParams& mask, cudaStream_t stream) {
  const LatencyParams& call = params.send.call;
  if (mask.present()) {
    const cudaError_t error = launch_combine_send(params.send, mask, stream);
    return error == cudaSuccess ? launch_combine_receive({params.receive, call}, mask, stream) : error;
  }
  if (is_small(params)) {
    return kSmall.launch(small_idx(params.send.rows), call.num_blocks, call.overlaps, small_params(params), stream);
  }
  return kWhole.launch(whole_idx(params), call.num_blocks, call.overlaps, params, stream);
}

cudaError_t launch_combine_send(const CombineSendParams& params, const MaskParams& mask, cudaStream_t stream) {
  const int num_blocks = params.call.num_blocks;
  if (const LatencyCombineParams whole{params, {}}; is_small(whole)) return launch_small_half(whole, false, stream);
  if (!mask.present()) {
    return kHalf.launch(kernel_idx(params.rows), num_blocks, params.call.overlaps, CombineHalf<false>(params), stream);
  }
  const MaskGateParams gate = gate_of(params.call, mask);
  const Masked<CombineSendParams> masked{params, mask};
  cudaError_t error = launch_grants_gate(gate, stream);
  if (params.own_weights && params.rows.order == CombineOrder::kRankSums) {
    if (error == cudaSuccess) error = kMaskedWeights.launch(0, num_blocks, false, masked, stream);
    if (error == cudaSuccess) error = launch_weights_gate(gate, stream);
  }
  if (error != cudaSuccess) return error;
  return kMaskedHalf.launch(static_cast<int>(params.rows.kind), num_blocks, false, CombineHalf<true>(masked), stream);
}

cudaError_t launch_combine_receive(const CombineReceiveParams& params, const MaskParams& mask, cudaStream_t stream) {
  const int num_blocks = params.call.num_blocks;
  LatencyCombineParams whole;
  whole.send.call = params.call;
  whole.send.rows = params.rows;
  whole.receive = params;
  if (is_small(whole)) return launch_small_half(whole, true, stream);
  if (!mask.present()) {
    return kHalf.launch(kernel_idx(params.rows), num_blocks, params.call.overlaps, CombineHalf<false>(params), stream);
  }
  const cudaError_t error = launch_arrivals_gate(gate_of(params.call, mask), stream);
  if (error != cudaSuccess) return error;
  const Masked<CombineReceiveParams> masked{params, mask};
  return kMaskedHalf.launch(static_cast<int>(params.rows.kind), num_blocks, false, CombineHalf<true>(masked), stream);
}

cudaError_t load_latency_combine(bool masks) {
  const cudaError_t error = load_rows(kWhole, kSmall, kHalf, kSmallHalf);
  return error == cudaSuccess && masks ? load_rows(kMaskedHalf, kMaskedWeights) : error;
}

}  // namespace ferry::cuda
