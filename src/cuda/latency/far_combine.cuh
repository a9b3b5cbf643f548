#ifndef FERRY_CUDA_LATENCY_FAR_COMBINE_CUH
#define FERRY_CUDA_LATENCY_FAR_COMBINE_CUH

/// A combine in groups of several nodes. Its send half is that of one node, but rows for far ranks go to memory from
/// which the network takes them. Its receive half adds up in another order (node_sum.cuh).
///
/// The first block alone looks at words in host memory (await_far_turn). In the send half it posts weights to far ranks
/// before it waits for theirs, and the message to each far rank; the others report what they have stored of it. In the
/// receive half it waits for the messages of far ranks.

#include "cuda/latency/combine_receive.cuh"
#include "cuda/latency/combine_send.cuh"
#include "cuda/latency/far_keeper.cuh"
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

/// Words that hold this many weights: at least one.
__device__ inline int num_weight_words(std::int64_t num_weights) {
  return static_cast<int>(num_far_words(num_weights == 0 ? 1 : num_weights));
}

/// Posts the weights of this rank's tokens to all far ranks. All lanes of one warp of the first block.
__device__ inline void post_far_weights(const FarCombineParams& params, std::uint64_t number, const int* sets) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
  const FarLayout& layout = far.layout;
  std::byte* const to = far.outbox + far.weights_out();
  const std::int64_t count = std::int64_t{call.tables.tokens_of_rank[call.ranks.rank]} * call.num_topk;
  const int num_words = num_weight_words(count);
  const auto weight_at = [&params, count](int idx) { return idx < count ? __float_as_uint(params.weights[idx]) : 0; };
#pragma unroll 4
  for (int i = lane_idx(); i < num_words; i += kWarpLanes) store_far_word(to, i, number, weight_at);
  __syncwarp();
#pragma unroll 1
  for (int idx = lane_idx(); idx < layout.num_far(); idx += kWarpLanes) {
    const int rank = layout.far_rank(idx);
    if (sets[rank] == kNoSet) continue;
    const FarPart weights =
        far.part(far.weights_out(), layout.weights_at(sets[rank], layout.far_idx_at(rank, call.ranks.rank)),
                 num_words * kFarWordBytes);
    post_message(call, far, kFarWeights, rank, number, {weights, {}, sets[rank]});
    far.state->weighed[rank] = number;
  }
}

/// Waits for the call's turn on this node and on the others, and posts this rank's weights. First warp of each block.
__device__ __noinline__ inline void begin_nodes_send(const FarCombineParams& params, const CombineSendShared& shared,
                                                     bool routed) {
  const LatencyParams& call = params.call;
  const FarLook look(params.far, LatencyKind::kCombine);
  bool fits = true;
  const auto meanwhile = [&params, &shared, &fits, routed] {
    if (routed) fits = place_returns(params, shared.far_firsts);
  };
  std::uint64_t number = wait_for_turn<false>(call, LatencyKind::kCombine, shared.sets, meanwhile, &params.far.layout);
  const bool weighs = sends_weights(params, routed);
  // The first block posts weights.
  if (number != 0 &&
      !await_far_turn(call, params.far, LatencyKind::kCombine, number, shared.far_sets, look, weighs && is_clerk())) {
    number = 0;
  }
  if (number != 0 && !fits) {
    if (is_clerk() && lane_idx() == 0) refuse_message(call, params.far.layout.far_rank(0), number);
    number = 0;
  }
  if (number != 0 && is_clerk() && weighs) post_far_weights(params, number, shared.far_sets);
  if (lane_idx() == 0) *shared.number = number;
}

/// Waits for a word of a far rank's weights, in memory of the host for all of them; also ends if that rank makes
/// another call, whose sums are not used. `word`: its half that has the number. One thread.
__device__ __noinline__ inline bool await_far_weight(const FarCombineParams& params, std::uint64_t number, int set,
                                                     int source, const std::uint64_t* word, bool& other) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
  const std::uint64_t* const arrived = inbox_word(far, far.layout.arrived_at(kFarWeights, source));
  const std::uint64_t* const message =
      inbox_word(far, far.layout.arrived_at(static_cast<int>(LatencyKind::kCombine), source));
  static_assert(offsetof(LatencyHeader, agreement) == 0);
  const auto* const agreement = reinterpret_cast<const WideWord*>(header_in(far, LatencyKind::kCombine, set, source));
  const auto read = [&] {
    const bool here =
        far.layout.in_gpu ? is_word_of(load_relaxed_system(word), number) : load_acquire_system(arrived) >= number;
    if (here) return number;
    if (!far.layout.in_gpu && load_acquire_system(message) < number) return std::uint64_t{0};
    // Acquired, since half of the word is used (load_wide_relaxed_system).
    other = is_word_of(load_acquire_system(&agreement->high), number) &&
            load_relaxed_system(&agreement->low) != call.agreement;
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
    const auto* const first =
        reinterpret_cast<const WideWord*>(params.far.inbox + layout.weights_at(set, layout.far_idx(source)));
    bool other = false;
    came = await_far_weight(params, number, set, source, &first->high, other);
    others[source] = other ? 1 : 0;
  }
  if (__syncthreads_and(static_cast<int>(came)) == 0) return false;
#pragma unroll 1
  for (int idx = 0; idx < layout.num_far(); ++idx) {
    const int source = layout.far_rank(idx);
    const auto* const from =
        reinterpret_cast<const WideWord*>(params.far.inbox + layout.weights_at(set, layout.far_idx(source)));
    std::uint64_t* const words = weight_words(call, call.ranks.rank, set, source);
    const std::int64_t count = std::int64_t{call.tables.tokens_of_rank[source]} * call.num_topk;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); came && i < num_far_words(count); i += kCombineThreads) {
      WideWord word = load_wide_relaxed_system(from + i);
      if (others[source] == 0 && !is_word_of(word, number)) {
        came = wait_payload(call, {Awaited::kEntry, source, number}, &from[i].high).came;
        word = load_wide_relaxed_system(from + i);
      }
      const std::uint32_t weights[] = {static_cast<std::uint32_t>(word.low), static_cast<std::uint32_t>(word.low >> 32),
                                       payload_of(word.high)};
#pragma unroll
      for (int part = 0; part < kFarWordPayloads; ++part) {
        const int at = i * kFarWordPayloads + part;
        if (at < count) post_word(words + at, number, others[source] != 0 ? 0 : weights[part]);
      }
    }
  }
  return __syncthreads_and(static_cast<int>(came)) != 0;
}

/// Writes the headers of the messages to far ranks. All lanes of one warp of the first block.
__device__ inline void write_return_headers(const FarCombineParams& params, bool routed, std::uint64_t number) {
  const LatencyParams& call = params.call;
  LatencyHeader header;
  header.agreement = routed ? call.agreement : 0;
  header.record_number = call.record_number;
  header.num_tokens = call.num_tokens;
  write_far_headers(call, params.far, LatencyKind::kCombine, number, header);
}

/// Rows that a combine returns to a far rank.
struct ReturnedRows {
  int set;
  std::int32_t first_there;  ///< place of the first in the receiver's set
  std::int32_t num_rows;
  std::int32_t first_here;   ///< place of the first in FarCombineParams::returns
  std::int64_t word_stride;  ///< return_word_stride()
};

__device__ inline FarPart returned_part(const FarCombineParams& params, const ReturnedRows& rows) {
  const FarLayout& layout = params.far.layout;
  const bool words = rows.word_stride != 0;
  const std::int64_t stride = words ? rows.word_stride : params.rows.wire_stride();
  const std::int64_t to = words ? layout.return_words_at(rows.set) : layout.returns_at(rows.set);
  return {params.returns_of_network + static_cast<std::uint64_t>(rows.first_here * params.returns_stride),
          params.far.inbox_of_network + to + rows.first_there * stride, rows.num_rows * stride};
}

/// Parts of a block's state that write_return_posts() needs.
struct ReturnPosts {
  const int* sets;             ///< [R] set in which each far rank receives this call
  const std::int32_t* firsts;  ///< [R] place of the first row for each in FarCombineParams::returns
  bool routed;                 ///< CombineStart::routed
};

/// Writes the posts of the messages to far ranks, which do not depend on the rows. All lanes of one warp of the first
/// block.
__device__ inline void write_return_posts(const FarCombineParams& params, const ReturnPosts& posts) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
  const FarReturns& returns = call.tables.far_returns(params.rows.order);
#pragma unroll 1
  for (int idx = lane_idx(); idx < far.layout.num_far(); idx += kWarpLanes) {
    const int rank = far.layout.far_rank(idx);
    const int set = posts.sets[rank];
    FarParts parts;
    parts.front = part_with_header(call, far, LatencyKind::kCombine, idx, set, 0, kFarHeaderBytes);
    parts.set = set;
    parts.num_blocks = num_adding_blocks();
    if (posts.routed && set != kNoSet) {
      const std::int64_t word_stride = return_word_stride(call, params.rows, far.layout);
      parts.announced = word_stride == 0;
      parts.rows =
          returned_part(params, {set, returns.firsts[rank], returns.num_rows[rank], posts.firsts[rank], word_stride});
    }
    write_post(call, far, static_cast<int>(LatencyKind::kCombine), rank, parts);
  }
  __syncwarp();
}

/// send_combine() in groups of several nodes.
template <RowKind kKind>
__device__ inline bool send_nodes_combine(const FarCombineParams& params, const CombineSendShared& shared,
                                          const CombineStart& start) {
  bool good = true;
  if (warp_idx() != 0 && !is_clerk()) {
    CombineSender<kKind, false, FarCombineParams> sender(params, shared);
    good = sender.send_all(start);
  } else {
    const auto wait = [&params, &shared, &start] {
      if (warp_idx() == 0) begin_nodes_send(params, shared, start.routed);
      if (warp_idx() == 1 && is_clerk()) begin_far_grants(params.call, params.far, LatencyKind::kCombine);
    };
    good = meet_at_turn(params, shared, start.routed, wait);
    if (good && is_clerk()) {
      if (warp_idx() == 0) {
        write_return_headers(params, start.routed, *shared.number);
        write_return_posts(params, {shared.far_sets, shared.far_firsts, start.routed});
        announce<false>(params.call, start.routed, *shared.number, shared.sets);
      }
      // The first block returns no rows; its posts are written before it takes their memory.
      if (sends_weights(params, start.routed)) {
        __syncthreads();
        good = import_weights(params, shared, shared.far_firsts);
      }
    }
  }
  return end_send<false>(params, shared, start, good, 0);
}

/// Posts what a combine sends to far ranks, whose posts are written, or in other blocks than the first reports the
/// block's part. The posting warp, behind a barrier of the block.
__device__ inline void post_returns(const FarParams& far, std::uint64_t number) {
  if (!is_clerk()) {
    report_block(far, LatencyKind::kCombine, static_cast<int>(blockIdx.x) - 1, number);
    return;
  }
#pragma unroll 1
  for (int idx = lane_idx(); idx < far.layout.num_far(); idx += kWarpLanes) {
    post_number(far, static_cast<int>(LatencyKind::kCombine), far.layout.far_rank(idx), number);
  }
}

/// Waits for the headers of far ranks' messages and writes them into this rank's window, where all blocks wait for
/// them, and then for rows that are no words: none may come when their place has been granted again, even if the call
/// is refused. All threads of the first block; false in all of them when the group broke. `keeper`: of this warp's last
/// far rank, to be kept at the end. `all_left`: keep_departures(), in the last warp.
__device__ inline bool import_far_headers(const LatencyParams& call, const CombineRows& rows, const FarParams& far,
                                          const SentCall& sent, FarKeeper& keeper, bool& all_left) {
  const bool rows_come = far.layout.in_gpu && return_word_stride(call, rows, far.layout) == 0;
  bool whole = true;
#pragma unroll 1
  for (int idx = warp_idx(); whole && idx < far.layout.num_far(); idx += kCombineWarps + 1) {
    const int source = far.layout.far_rank(idx);
    keeper.keep(call, far);
    keeper = FarKeeper(far, source);
    LaneFarWords header;
    whole = await_far_header(call, far, LatencyKind::kCombine, sent, source, header);
    if (!whole) break;
    if (!far.layout.in_gpu) fence_device();  // hands on the rows, which the network has written
    const bool same = import_header(call, far, LatencyKind::kCombine, sent, source, header);
    keeper.note(call, header);
    if (same && rows_come) whole = await_arrived(call, far, LatencyKind::kCombine, sent.number, source);
  }
  if (__syncthreads_and(static_cast<int>(whole)) == 0) return false;
  // While other blocks add.
  if (warp_idx() == kCombineWarps) all_left = keep_departures(call, far, [] { return true; });
  return true;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_COMBINE_CUH
