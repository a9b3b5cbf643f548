/// The kernel of a combine of latency mode in groups of several nodes: each half. All blocks that wait for other ranks
/// must run at once, as in dispatch.cu.

#include "cuda/latency/far_combine.cuh"

#include "cuda/latency/kernel_row.hpp"
#include "cuda/latency/kernels.hpp"
#include "cuda/latency/small_nodes_combine.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;  // NOLINT(google-build-using-namespace)

using NodesHalf = EitherHalf<FarCombineParams, CombineReceiveParams>;

/// Makes a send half.
template <RowKind kKind>
__device__ void make_nodes_send_half(const FarCombineParams& params) {
  const LatencyParams& call = params.call;
  const CombineStart start = CombineStart::of(call);
  const CombineSendShared shared = CombineSendShared::at(dynamic_shared(), call.ranks.num_ranks, true);
  if (!send_nodes_combine<kKind>(params, shared, start)) return;
  if (warp_idx() == kPostingWarp) post_returns(params.far, *shared.number);
  if (is_clerk() && warp_idx() == 0) publish_grants(call, params.far);  // of the set that end_send() has granted
  if (threadIdx.x != 0) return;
  const std::uint64_t number = *shared.number;
  if (blockIdx.x == 0) {
    *call.tables.combine = {number, static_cast<std::uint32_t>(shared.sets[call.ranks.rank]), 1, 0};
  }
  end_turn(call, LatencyKind::kCombine, number);
}

/// Makes a receive half.
template <RowKind kKind>
__device__ void make_nodes_receive_half(const CombineReceiveParams& params) {
  const LatencyParams& call = params.call;
  const CombineStart start = CombineStart::of(call);
  const volatile SentCall& pending = *call.tables.combine;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};
  if (is_clerk() && warp_idx() == 1) publish_grants(call, params.far);
  // All threads or none, since the block has barriers later.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks) || sent.pending == 0)) != 0) return;
  FarKeeper keeper;
  bool all_left = true;
  if (is_clerk() && !import_far_headers(call, params.rows, params.far, sent, keeper, all_left)) return;
  const CombineReceiveShared shared = CombineReceiveShared::at(dynamic_shared(), call.ranks.num_ranks);
  if (!receive_combine<kKind, Receiving::kNodes>(call, params, sent, shared, start.routed)) return;
  const bool is_last = is_last_block(call.tables.combine->arrivals);
  keeper.keep(call, params.far);
  if (!all_left) keep_departures(call, params.far, [] { return true; });
  if (!is_last) return;
  if (threadIdx.x == 0) *call.tables.combine = {};
  if (warp_idx() == 0) leave_far_set(call, params.far, LatencyKind::kCombine, sent);
}

/// Makes either half.
template <RowKind kKind>
__global__ void __launch_bounds__(kCombineThreads) combine_nodes_kernel(const __grid_constant__ NodesHalf params) {
  await_kernel_before();
  if (params.receives) {
    make_nodes_receive_half<kKind>(params.receive);
  } else {
    make_nodes_send_half<kKind>(params.send);
  }
}

/// State of a block of a call whose sums are all words, far ranks' part behind the rest.
__device__ SmallCombineShared& small_shared() { return *reinterpret_cast<SmallCombineShared*>(dynamic_shared()); }
__device__ SmallFarCombineShared& small_far_shared() {
  return *reinterpret_cast<SmallFarCombineShared*>(dynamic_shared() + round_up_part(sizeof(SmallCombineShared)));
}

template <RowKind kKind>
using FarAdder = SmallAdder<kKind, kFarSumVectors<kKind>, SmallFarAdder>;

/// Makes the send half of such a call.
template <RowKind kKind>
__device__ void make_small_send_half(const SmallNodesCombineParams& params) {
  const LatencyParams& call = params.send.call;
  const FarParams& far = params.send.far;
  SmallCombineShared& shared = small_shared();
  SmallFarCombineShared& far_shared = small_far_shared();
  bool good = true;
  SentCall sent{};
  if (!is_clerk()) {
    if (warp_idx() != 0) {
      FarAdder<kKind> adder(params, shared, SmallFarAdder(params, far_shared));
      good = adder.send();
    } else {
      take_small_turn(params, shared, far_shared);
      __syncthreads();
    }
  } else if (warp_idx() == 0) {
    take_small_turn(params, shared, far_shared);
    if (shared.number != 0) announce_small(params, shared, far_shared);
  } else if (warp_idx() == 1) {
    good = begin_small_books(call, sent);
    if (good) publish_grants(call, far);
  }
  if (__syncthreads_and(static_cast<int>(good)) == 0 || shared.number == 0) return;
  const std::uint64_t number = shared.number;
  if (warp_idx() == kPostingWarp) post_returns(far, number);
  // The warp that has `sent`, in the first block.
  if (threadIdx.x != (is_clerk() ? kWarpLanes : 0)) return;
  if (is_clerk()) *call.tables.combine = sent;
  end_turn(call, LatencyKind::kCombine, number);
}

/// Makes the receive half of such a call.
template <RowKind kKind>
__device__ void make_small_receive_half(const SmallNodesCombineParams& params) {
  const LatencyParams& call = params.send.call;
  const FarParams& far = params.send.far;
  SmallCombineShared& shared = small_shared();
  SmallFarCombineShared& far_shared = small_far_shared();
  SentCall& words = *call.tables.combine;
  const volatile SentCall& pending = words;
  const SentCall sent{pending.number, pending.set, pending.pending, 0};  // unchanged until all blocks are done
  const SmallFarAdder far_adder(params, far_shared);
  FarAdder<kKind> adder(params, shared, far_adder);
  std::int32_t home = -1;
  if (!is_clerk() && warp_idx() != 0) home = adder.load_home(first_combine_unit());
  if (is_clerk() && warp_idx() == 1) publish_grants(call, far);
  if (threadIdx.x == 0) {
    shared.number = sent.number;
    shared.sets[call.ranks.rank] = static_cast<int>(sent.set);
    far_shared.num_headers = 0;
    far_shared.num_others = 0;
  }
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks) || sent.pending == 0)) != 0) return;
  const bool clears = clears_far_set(far, LatencyKind::kCombine, sent);
  if (!clears && !is_clerk() && threadIdx.x == 0) enter_receive_half(words);
  bool good = true;
  if (is_clerk()) {
    good = import_small_headers(params, sent, far_adder, far_shared);
  } else if (warp_idx() != 0) {
    good = adder.receive(home);
  }
  if (__syncthreads_and(static_cast<int>(good)) == 0) return;
  leave_small_far_half(call, far, LatencyKind::kCombine, words, sent, clears);
}

/// Makes either half of such a call.
template <RowKind kKind>
__global__ void __launch_bounds__(kCombineThreads)
    combine_nodes_small_kernel(const __grid_constant__ SmallNodesCombineParams params) {
  await_kernel_before();
  if (params.is_receive) {
    make_small_receive_half<kKind>(params);
  } else {
    make_small_send_half<kKind>(params);
  }
}

std::size_t small_half_bytes(const SmallNodesCombineParams& /*params*/) {
  return round_up_part(sizeof(SmallCombineShared)) + sizeof(SmallFarCombineShared);
}

std::size_t half_bytes(const NodesHalf& params) {
  if (params.receives) return CombineReceiveShared::at(nullptr, params.receive.call.ranks.num_ranks).size_bytes;
  return CombineSendShared::at(nullptr, params.send.call.ranks.num_ranks, true).size_bytes;
}

// One kernel for each kind of rows.
constexpr KernelRow<NodesHalf, kNumRowKinds> kHalf = {
    {combine_nodes_kernel<RowKind::kBfloat16>, combine_nodes_kernel<RowKind::kFloat32>,
     combine_nodes_kernel<RowKind::kFp8Sums>},
    kCombineThreads,
    half_bytes};

constexpr KernelRow<SmallNodesCombineParams, kNumRowKinds> kSmallHalf = {
    {combine_nodes_small_kernel<RowKind::kBfloat16>, combine_nodes_small_kernel<RowKind::kFloat32>,
     combine_nodes_small_kernel<RowKind::kFp8Sums>},
    kCombineThreads,
    small_half_bytes};

cudaError_t launch_small_half(SmallNodesCombineParams params, cudaStream_t stream) {
  const LatencyParams& call = params.send.call;
  const CombineRows& rows = params.send.rows;
  const int num_warps = (call.num_blocks - 1) * kCombineWarps;
  const int num_ranks = call.ranks.num_ranks;
  params.ranks = SmallDivisor::of(num_ranks);
  params.sends = SmallUnits::of(rows, static_cast<int>(call.max_tokens) * num_ranks, num_warps);
  params.receives = SmallUnits::of(rows, static_cast<int>(call.num_tokens), num_warps);
  return kSmallHalf.launch(static_cast<int>(rows.kind), call.num_blocks, call.overlaps, params, stream);
}

}  // namespace

int word_step_vectors_over_nodes(const CombineRows& rows, std::int64_t max_tokens, const LatencyLayout& window,
                                 const FarLayout& far) {
  if (rows.order != CombineOrder::kRankSums || far.num_ranks > kSmallRanks) return 0;
  const std::int64_t near_bytes =
      rows.fp8() ? rows.far_words_bytes() : row_words_bytes(rows.row_bytes, kFarStepVectors);
  const std::int64_t longer_bytes = max_tokens * far.num_far() * (rows.far_words_bytes() - rows.wire_stride());
  const std::int64_t most_tokens = rows.fp8() ? kFarFp8SumTokens : kFarSumTokens;
  const bool pays = max_tokens <= kFarWordTokens || longer_bytes <= kMostLongerSums;
  const bool fits = max_tokens <= most_tokens && max_tokens * near_bytes <= window.row_words_bytes &&
                    far_words_fit(rows.row_bytes, rows.far_words_bytes(), max_tokens, far.sum_words_bytes);
  if (!pays || !fits) return 0;
  return rows.fp8() ? kFp8StepVectors : kFarStepVectors;
}

cudaError_t launch_nodes_combine_send(const FarCombineParams& params, cudaStream_t stream) {
  if (params.rows.words()) {
    SmallNodesCombineParams half;
    half.send = params;
    return launch_small_half(half, stream);
  }
  return kHalf.launch(static_cast<int>(params.rows.kind), params.call.num_blocks, params.call.overlaps,
                      NodesHalf(params), stream);
}

cudaError_t launch_nodes_combine_receive(const CombineReceiveParams& params, cudaStream_t stream) {
  if (params.rows.words()) {
    SmallNodesCombineParams half;
    half.receive = params;
    half.is_receive = true;
    half.send.call = params.call;
    half.send.rows = params.rows;
    half.send.own_weights = params.own_weights;
    half.send.far = params.far;
    return launch_small_half(half, stream);
  }
  return kHalf.launch(static_cast<int>(params.rows.kind), params.call.num_blocks, params.call.overlaps,
                      NodesHalf(params), stream);
}

cudaError_t load_nodes_combine() { return load_rows(kHalf, kSmallHalf); }

}  // namespace ferry::cuda
