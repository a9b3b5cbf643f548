#ifndef FERRY_CUDA_LATENCY_NODES_COMBINE_CUH
#define FERRY_CUDA_LATENCY_NODES_COMBINE_CUH

/// A combine in groups of several nodes. Its send half is that of one node, but rows for far ranks go to memory from
/// which the network takes them. Its receive half adds up in another order (node_sum.cuh).
///
/// The first block alone looks at words in host memory (await_far_turn). In the send half it posts weights to far ranks
/// before it waits for theirs; in the receive half it waits for the messages of far ranks. The last block that is done
/// posts the message to each far rank.

#include "cuda/latency/combine_receive.cuh"
#include "cuda/latency/combine_send.cuh"
#include "cuda/latency/far_words.cuh"

namespace ferry::cuda::device {

/// Whether weights of this combine travel.
__device__ inline bool sends_weights(const CombineSendParams& params, bool routed) {
  return routed && params.own_weights && params.rows.order == CombineOrder::kRankSums;
}

/// Finds the place of the first row for each far rank in the memory that rows leave from. False if that is too small.
/// All lanes of one warp.
__device__ inline bool place_returns(const FarCombineParams& params, std::int32_t* firsts) {
  const FarLayout& layout = params.far.layout;
  const std::int32_t* const num_rows = params.call.tables.far_returns(params.rows.order).num_rows;
  std::int32_t begin = 0;
#pragma unroll 1
  for (int first = 0; first < layout.num_far(); first += kWarpLanes) {
    const int idx = first + lane_idx();
    const int rank = idx < layout.num_far() ? layout.far_rank(idx) : -1;
    std::int32_t total = 0;
    const std::int32_t before = prefix_sum(rank < 0 ? 0 : num_rows[rank], total);
    if (rank >= 0) firsts[rank] = begin + before;
    begin += total;
  }
  return begin <= params.most_returns;
}

/// Posts the weights of this rank's tokens to all far ranks. All lanes of one warp of the first block.
__device__ inline void post_far_weights(const FarCombineParams& params, std::uint64_t number, const int* sets) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
  const FarLayout& layout = far.layout;
  auto* const to = reinterpret_cast<float*>(far.outbox + far.weights_out());
  const std::int64_t count = call.num_tokens * call.num_topk;
  const std::int64_t num_bytes = count == 0 ? kRowAlignment : round_up_row(count * std::int64_t{sizeof(float)});
#pragma unroll 4
  for (std::int64_t i = lane_idx(); i < count; i += kWarpLanes) to[i] = params.weights[i];
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < layout.num_far(); idx += kWarpLanes) {
    const int rank = layout.far_rank(idx);
    if (sets[rank] == kNoSet) continue;
    const FarPart weights =
        far.part(far.weights_out(), layout.weights_at(sets[rank], layout.far_idx_at(rank, call.ranks.rank)), num_bytes);
    post_message(call, far, kFarWeights, rank, number, weights, {});
    far.state->weighed[rank] = number;
  }
}

/// Waits for the call's turn on this node and on the others, and posts this rank's weights. First warp of each block.
__device__ __noinline__ inline void begin_nodes_send(const FarCombineParams& params, const CombineSendShared& shared,
                                                     bool routed) {
  const LatencyParams& call = params.call;
  const FarLook look(params.far, LatencyKind::kCombine);
  std::uint64_t number = wait_for_turn<false>(
      call, LatencyKind::kCombine, shared.sets, [] {}, &params.far.layout);
  const bool weighs = sends_weights(params, routed);
  // The first block posts weights.
  if (number != 0 &&
      !await_far_turn(call, params.far, LatencyKind::kCombine, number, shared.far_sets, look, weighs && is_clerk())) {
    number = 0;
  }
  if (number != 0 && routed && !place_returns(params, shared.far_firsts)) {
    if (is_clerk() && lane_idx() == 0) refuse_message(call, params.far.layout.far_rank(0), number);
    number = 0;
  }
  if (number != 0 && is_clerk() && weighs) post_far_weights(params, number, shared.far_sets);
  if (lane_idx() == 0) *shared.number = number;
}

/// Waits for the weights of a far rank; also ends if that makes another call, whose sums are not used. One thread.
__device__ __noinline__ inline bool await_far_weights(const FarCombineParams& params, std::uint64_t number, int set,
                                                      int source, bool& other) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
  const std::uint64_t* const weights = inbox_word(far, far.layout.arrived_at(kFarWeights, source));
  const std::uint64_t* const message =
      inbox_word(far, far.layout.arrived_at(static_cast<int>(LatencyKind::kCombine), source));
  constexpr std::size_t kAgreementWord = offsetof(LatencyHeader, agreement) / sizeof(std::uint32_t);
  const FarHeader& header = header_in(far, LatencyKind::kCombine, set, source);
  const auto read = [&] {
    if (load_acquire_system(weights) >= number) return number;
    if (load_acquire_system(message) < number) return std::uint64_t{0};
    const auto* const agreement = static_cast<const volatile std::uint32_t*>(header.words + kAgreementWord);
    other = (static_cast<std::uint64_t>(agreement[1]) << 32 | agreement[0]) != call.agreement;
    return other ? number : 0;
  };
  return wait_until(call.ranks, {Awaited::kEntry, source, number}, read, number, CallCount(call, source));
}

/// Writes the weights of far ranks' tokens into this rank's window, as ranks of this node write theirs. All threads of
/// the first block; false in all of them when the group broke. `others` [R]: memory for this.
__device__ __noinline__ inline bool import_weights(const FarCombineParams& params, const CombineSendShared& shared,
                                                   std::int32_t* others) {
  const LatencyParams& call = params.call;
  const FarLayout& layout = params.far.layout;
  const std::uint64_t number = *shared.number;
  const int set = shared.sets[call.ranks.rank];
  bool came = true;
#pragma unroll 1
  for (int idx = warp_idx(); lane_idx() == 0 && came && idx < layout.num_far(); idx += kCombineWarps + 1) {
    const int source = layout.far_rank(idx);
    bool other = false;
    came = await_far_weights(params, number, set, source, other);
    others[source] = other ? 1 : 0;
  }
  if (__syncthreads_and(static_cast<int>(came)) == 0) return false;
#pragma unroll 1
  for (int idx = 0; idx < layout.num_far(); ++idx) {
    const int source = layout.far_rank(idx);
    const auto* const from =
        reinterpret_cast<const float*>(params.far.inbox + layout.weights_at(set, layout.far_idx(source)));
    std::uint64_t* const words = weight_words(call, call.ranks.rank, set, source);
    const std::int64_t count = std::int64_t{call.tables.tokens_of_rank[source]} * call.num_topk;
#pragma unroll 2
    for (std::int64_t i = threadIdx.x; i < count; i += kCombineThreads) {
      post_word(words + i, number, others[source] != 0 ? 0 : __float_as_uint(from[i]));
    }
  }
  return true;
}

/// send_combine() in groups of several nodes.
template <bool kFloat32>
__device__ inline bool send_nodes_combine(const FarCombineParams& params, const CombineSendShared& shared,
                                          const CombineStart& start) {
  bool good = true;
  if (warp_idx() != 0 && !is_clerk()) {
    CombineSender<kFloat32, false, FarCombineParams> sender(params, shared);
    good = sender.send_all(start);
  } else {
    const auto wait = [&params, &shared, &start] {
      if (warp_idx() == 0) begin_nodes_send(params, shared, start.routed);
      if (warp_idx() == 1 && is_clerk()) begin_far_grants(params.call, params.far, LatencyKind::kCombine);
    };
    good = meet_at_turn(params, shared, start.routed, wait);
    if (good && is_clerk()) {
      if (warp_idx() == 0) announce<false>(params.call, start.routed, *shared.number, shared.sets);
      // The first block returns no rows.
      if (sends_weights(params, start.routed)) good = import_weights(params, shared, shared.far_firsts);
    }
  }
  return end_send<false>(params, shared, start, good, 0);
}

/// Rows that a combine returns to a far rank.
struct ReturnedRows {
  int set;
  std::int32_t first_there;  ///< place of the first in the receiver's set
  std::int32_t num_rows;
  std::int32_t first_here;  ///< place of the first in FarCombineParams::returns
};

__device__ inline FarPart returned_part(const FarCombineParams& params, const ReturnedRows& rows) {
  const std::int64_t stride = round_up_row(params.rows.row_bytes);
  return {params.returns_of_network + static_cast<std::uint64_t>(rows.first_here * stride),
          params.far.inbox_of_network + params.far.layout.returns_at(rows.set) + rows.first_there * stride,
          rows.num_rows * stride};
}

/// Posts what a combine sends to far ranks. All lanes of one warp of the last block.
__device__ inline void post_returns(const FarCombineParams& params, const CombineSendShared& shared, bool routed) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
  const FarReturns& returns = call.tables.far_returns(params.rows.order);
  LatencyHeader header;
  header.agreement = routed ? call.agreement : 0;
  header.record_number = call.record_number;
  header.num_tokens = call.num_tokens;
  write_far_headers(call, far, LatencyKind::kCombine, header);
  // The first block has used the memory of the places for something else (import_weights).
  if (is_clerk() && sends_weights(params, routed)) place_returns(params, shared.far_firsts);
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < far.layout.num_far(); idx += kWarpLanes) {
    const int rank = far.layout.far_rank(idx);
    const int set = shared.far_sets[rank];
    FarPart rows;
    if (routed && set != kNoSet) {
      rows = returned_part(params, {set, returns.firsts[rank], returns.num_rows[rank], shared.far_firsts[rank]});
    }
    post_far(call, far, LatencyKind::kCombine, idx, set, *shared.number, static_cast<std::int64_t>(kFarHeaderBytes),
             rows);
  }
}

/// Waits for the messages of far ranks and writes their headers into this rank's window, where all blocks wait for
/// them. All threads of the first block; false in all of them when the group broke.
__device__ inline bool import_far_headers(const LatencyParams& call, const FarParams& far, const SentCall& sent) {
  bool whole = true;
#pragma unroll 1
  for (int idx = warp_idx(); whole && idx < far.layout.num_far(); idx += kCombineWarps + 1) {
    const int source = far.layout.far_rank(idx);
    whole = await_far(call, far, LatencyKind::kCombine, sent.number, source);
    if (!whole) break;
    const FarHeader& header = header_in(far, LatencyKind::kCombine, static_cast<int>(sent.set), source);
    const std::uint32_t word = word_of_header(header);
    fence_device();  // hands on what the network has written
    import_header(call, far, LatencyKind::kCombine, sent, source, word);
  }
  if (__syncthreads_and(static_cast<int>(whole)) == 0) return false;
#pragma unroll 1
  for (int idx = warp_idx(); idx < far.layout.num_far(); idx += kCombineWarps + 1) {
    keep_words(far, LatencyKind::kCombine, static_cast<int>(sent.set), far.layout.far_rank(idx));
  }
  return true;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_NODES_COMBINE_CUH
