#ifndef FERRY_CUDA_LATENCY_SMALL_NODES_COMBINE_CUH
#define FERRY_CUDA_LATENCY_SMALL_NODES_COMBINE_CUH

/// A small combine (small_combine.cuh) in groups of several nodes: sums are words inside a node and between nodes, all
/// in steps of kFarStepVectors, or of kFp8StepVectors if they are FP8. A message is one put: the header and sums behind
/// it (far_message.hpp). Whoever needs a word from another node reads it where the network has put it; headers are
/// imported too, for reports.

#include "cuda/latency/far_combine.cuh"
#include "cuda/latency/far_keeper.cuh"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/small_combine.cuh"

namespace ferry::cuda {

/// Parameters of either half.
struct SmallNodesCombineParams {
  FarCombineParams send;
  CombineReceiveRows receive;
  SmallDivisor ranks;   ///< as in SmallCombineParams
  SmallUnits sends;     ///< as there
  SmallUnits receives;  ///< as there
  bool is_receive = false;
};

namespace device {

/// State of a block behind SmallCombineShared. Each [R], for far ranks.
struct SmallFarCombineShared {
  int sets[kSmallRanks];  ///< set in which the rank receives this call
  unsigned num_headers;   ///< headers of far ranks that are no longer waited for
  unsigned num_others;    ///< of these, such as are of another call
};

/// Rows of a token that sum_steps_over_nodes() adds.
struct SmallNodeRows : RankSums {
  unsigned far;  ///< ranks of other nodes among `ranks`
};

/// out[begin, end) = the sum of a token's rows in the order of docs/nodes.md, each counted once, added as they arrive.
/// `begin` is the start of a step. False when the group broke. All lanes of a warp.
template <bool kFloat32>
__device__ inline bool sum_steps_over_nodes(const LatencyParams& call, const SentCall& sent, const SmallNodeRows& rows,
                                            std::byte* out, int begin, int end) {
  constexpr int kVectors = kFarStepVectors;
  using Words = LaneWords<kVectors>;
  const int most_looks = call.counts_waits ? 0 : kWordLooks;  // looks are not counted as waits
  bool came = true;
#pragma unroll 1
  for (int step = begin; step < end && came; step += kVectors * kLineBytes) {
    const int num_vectors = count_vectors<kVectors>(end - step);
    const int num_far_vectors = count_line_vectors<kVectors>(end - step);
    LaneSums<kFloat32, kVectors> total;
    LaneSums<kFloat32, kVectors> node;
    total.clear();
    node.clear();
    const auto load = [&rows, step, num_vectors, num_far_vectors](int row, int rank) {
      const bool is_far = (rows.far >> rank & 1U) != 0;
      return Words::load(rows.rows[row] + word_offset(step, kVectors), is_far ? num_far_vectors : num_vectors);
    };
    Words next;
    if (rows.ranks != 0) next = load(0, __ffs(static_cast<int>(rows.ranks)) - 1);
    int row = 0;
#pragma unroll 1
    for (unsigned left = rows.ranks; left != 0 && came; ++row) {
      const int rank = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      Words words = next;
      if (left != 0) next = load(row + 1, __ffs(static_cast<int>(left)) - 1);
      const int num_words = (rows.far >> rank & 1U) != 0 ? num_far_vectors : num_vectors;
#pragma unroll 1
      for (int looks = 0; came && !words.are_of(sent.number, num_words); ++looks) {
        if (looks >= most_looks) {
          came = await_step(call, {Awaited::kRow, rank, sent.number}, rows.rows[row] + word_offset(step, kVectors),
                            num_words);
        }
        words = load(row, rank);
      }
      node.add(words, num_vectors);
      if ((rows.ends >> rank & 1U) == 0) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) total.vectors[i].add(node.vectors[i].round(), 1.0F);
      node.clear();
    }
    if (came) total.store(out + step, num_vectors);
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// Passed to SmallAdder.
class SmallFarAdder {
 public:
  static constexpr bool kPresent = true;
  using Params = SmallNodesCombineParams;

  __device__ SmallFarAdder(const SmallNodesCombineParams& params, const SmallFarCombineShared& shared)
      : params_(params),
        call_(params.send.call),
        far_(params.send.far),
        stride_(params.send.rows.far_words_bytes()),
        shared_(shared) {}

  __device__ bool is_far(int rank) const { return far_.layout.is_far(rank); }

  /// Place of the row of a far rank's token among those for that rank; -1: it has none, or has asked for fewer rows, as
  /// no rank of this build does.
  __device__ std::int32_t place_of(int source, int token) const {
    if (!is_far(source)) return -1;
    const std::int32_t place = call_.tables.sums_back.places[source * call_.max_tokens + token];
    return place < call_.tables.sums_back.num_rows[source] ? place : -1;
  }
  /// Words of that row, in memory from which the network takes them. Null if there are none to be sent.
  __device__ std::byte* row_out(int source, std::int32_t place) const {
    if (place < 0 || shared_.sets[source] == kNoSet) return nullptr;
    return header_out(far_, LatencyKind::kCombine, far_.layout.far_idx(source)) + kFarHeaderBytes + place * stride_;
  }
  /// Waits for the weight of a far rank's entry; also ends if the source makes another call: then the sum is not used.
  __device__ Payload await_weight(std::uint64_t number, int set, int source, int entry) const {
    const auto* const words =
        reinterpret_cast<const WideWord*>(far_.inbox + far_.layout.weights_at(set, far_.layout.far_idx(source)));
    const WideWord* const at = words + entry / kFarWordPayloads;
    bool came = is_word_of(look_for_word(call_, number, &at->high), number);
    bool other = false;
    if (!came) came = await_far_weight(params_.send, number, set, source, &at->high, other);
    fence_device();  // the word is loaded in two parts
    const WideWord word = load_wide_relaxed_system(at);
    const int part = entry % kFarWordPayloads;
    const std::uint32_t low = static_cast<std::uint32_t>(word.low >> (part % 2 * 32));
    return {part == kFarWordPayloads - 1 ? payload_of(word.high) : low, came};
  }

  /// Place of the row that a far rank returns for entry `at` of [T, K], among those of that rank.
  __device__ std::int32_t far_place_of(int at) const { return call_.tables.sums_back.own_places[at]; }
  /// This lane's entry of a token.
  struct Entry {
    std::int32_t home;
    std::int32_t far_place;  ///< far_place_of(), if the home is on a far rank
  };
  /// Writes bytes [begin, end) of the sum of a token; false when the group broke. `rows`: memory for kMaxTopk
  /// addresses. All lanes of a warp.
  template <RowKind kKind>
  __device__ bool sum_token(const SentCall& sent, const Entry& entry, int token, const std::byte** rows, int begin,
                            int end) const {
    const int lane = lane_idx();
    const unsigned ranks = ranks_of(entry.home);
    const bool returns = (ranks >> lane & 1U) != 0;
    const unsigned above = lane + 1 < kWarpLanes ? ranks >> (lane + 1) : 0;
    const unsigned far_ranks = __ballot_sync(kAllLanes, static_cast<int>(is_far(lane)));
    const bool is_last = returns && (above == 0 || !same_node(lane, lane + __ffs(static_cast<int>(above))));
    const RankSums of_token{rows, ranks, __ballot_sync(kAllLanes, static_cast<int>(is_last))};
    __syncwarp();
    if (entry.home >= 0) {
      // Lanes of one rank store the same.
      const int rank = home_rank(entry.home);
      using Rows = SmallRows<kKind, kFarSumVectors<kKind>>;
      const std::int64_t near_stride = Rows::words_bytes(static_cast<int>(params_.send.rows.row_bytes));
      const auto set = static_cast<int>(sent.set);
      rows[__popc(ranks & ((1U << rank) - 1U))] =
          is_far(rank)
              ? header_in(far_, LatencyKind::kCombine, set, rank) + kFarHeaderBytes + entry.far_place * stride_
              : own_window(call_).row_words(call_.layout, call_.ranks.num_ranks, set, rank) + token * near_stride;
    }
    __syncwarp();
    std::byte* const out = params_.receive.out + token * params_.receive.out_stride;
    if constexpr (kKind == RowKind::kFp8Sums) {
      return sum_fp8_words(call_, sent, of_token, out, begin, end);
    } else {
      const SmallNodeRows rows_of_nodes{of_token, ranks & far_ranks};
      return sum_steps_over_nodes<kKind == RowKind::kFloat32>(call_, sent, rows_of_nodes, out, begin, end);
    }
  }

  /// await_agreements(), far ranks by the words of their headers in the inbox. `of_all` false: ranks of this node. All
  /// lanes of a warp.
  __device__ Outcome await_agreements(const SentCall& sent, bool of_all = true) const {
    const int rank = lane_idx() / 2;
    const int word = lane_idx() % 2;
    bool came = true;
    bool equal = call_.agreement != 0;
    if (rank < call_.ranks.num_ranks && !is_far(rank)) {
      const std::uint64_t* const at =
          header_words(call_, call_.ranks.rank, LatencyKind::kCombine, static_cast<int>(sent.set), rank) + word;
      const Payload payload = wait_payload(call_, {Awaited::kEntry, rank, sent.number}, at);
      came = payload.came;
      equal = equal && payload.value == static_cast<std::uint32_t>(call_.agreement >> (word * 32));
    } else if (of_all && rank < call_.ranks.num_ranks && word == 0) {
      static_assert(offsetof(LatencyHeader, agreement) == 0);
      const auto* const at =
          reinterpret_cast<const WideWord*>(header_in(far_, LatencyKind::kCombine, static_cast<int>(sent.set), rank));
      // Acquired, since half of the word is used (load_wide_relaxed_system).
      came = wait_word(call_, {Awaited::kEntry, rank, sent.number}, &at->high).came;
      equal = equal && load_relaxed_system(&at->low) == call_.agreement;
    }
    if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return Outcome::kStop;
    return __all_sync(kAllLanes, static_cast<int>(equal)) != 0 ? Outcome::kGo : Outcome::kSkip;
  }

 private:
  __device__ bool same_node(int rank, int other) const {
    return rank / far_.layout.ranks_per_node == other / far_.layout.ranks_per_node;
  }

  const SmallNodesCombineParams& params_;
  const LatencyParams& call_;
  const FarParams& far_;
  const std::int64_t stride_;
  const SmallFarCombineShared& shared_;
};

/// Waits for the call's turn on this node and on the others. First warp of a block.
__device__ inline void take_small_turn(const SmallNodesCombineParams& params, SmallCombineShared& shared,
                                       SmallFarCombineShared& far_shared) {
  const LatencyParams& call = params.send.call;
  const FarParams& far = params.send.far;
  const FarLook look(far, LatencyKind::kCombine);
  const auto meanwhile = [&params] {
    if (is_clerk()) begin_far_grants(params.send.call, params.send.far, LatencyKind::kCombine);  // for the header
  };
  std::uint64_t number = wait_for_turn<false>(call, LatencyKind::kCombine, shared.sets, meanwhile, &far.layout);
  const bool routed = call.tables.summary->valid != 0;
  const bool weighs = sends_weights(params.send, routed);
  // The first block posts weights.
  if (number != 0 &&
      !await_far_turn(call, far, LatencyKind::kCombine, number, far_shared.sets, look, weighs && is_clerk())) {
    number = 0;
  }
  const int lane = lane_idx();
  if (lane < call.ranks.num_ranks) {
    shared.words[lane] =
        window_of(call, lane).row_words(call.layout, call.ranks.num_ranks, shared.sets[lane], call.ranks.rank);
  }
  if (lane == 0) shared.number = number;
  __syncwarp();
}

/// Writes the posts of the messages to far ranks, as write_return_posts(). All lanes of one warp of the first block.
__device__ inline void write_sum_posts(const FarCombineParams& params, const int* sets, bool routed) {
  const LatencyParams& call = params.call;
  const FarParams& far = params.far;
#pragma unroll 1
  for (int idx = lane_idx(); idx < far.layout.num_far(); idx += kWarpLanes) {
    const int rank = far.layout.far_rank(idx);
    FarParts parts;
    parts.set = sets[rank];
    parts.num_blocks = num_adding_blocks();
    const bool has_sums = routed && parts.set != kNoSet;
    const std::int64_t num_sums = has_sums ? call.tables.sums_back.num_rows[rank] : 0;
    parts.front = part_with_header(call, far, LatencyKind::kCombine, idx, parts.set, 0,
                                   kFarHeaderBytes + num_sums * params.rows.far_words_bytes());
    write_post(call, far, static_cast<int>(LatencyKind::kCombine), rank, parts);
  }
  __syncwarp();
}

/// Writes headers and posts to all ranks, and sends them their weights. First warp of the first block, after its turn.
__device__ inline void announce_small(const SmallNodesCombineParams& params, const SmallCombineShared& shared,
                                      const SmallFarCombineShared& far_shared) {
  const FarCombineParams& send = params.send;
  const LatencyParams& call = send.call;
  const bool routed = call.tables.summary->valid != 0;
  if (sends_weights(send, routed)) {
    post_far_weights(send, shared.number, far_shared.sets);
    post_weights(send, shared.number, shared.sets, WeightGroup(send, lane_idx()));
  }
  write_return_headers(send, routed, shared.number);
  write_sum_posts(send, far_shared.sets, routed);
  announce<true>(call, routed, shared.number, shared.sets);
  // Every rank refuses the call, but its number and set are used up, as when a host refuses it.
  if (!routed && lane_idx() == 0) report_refused_dispatch(call.ranks, *call.tables.summary);
}

/// Takes the header of a far rank's message, and all of its weights: none may come when their place has been granted
/// again. False when the group broke. All lanes of one warp.
__device__ inline bool import_small_header(const SmallNodesCombineParams& params, const SentCall& sent, int source,
                                           SmallFarCombineShared& shared) {
  const LatencyParams& call = params.send.call;
  const FarParams& far = params.send.far;
  FarKeeper keeper(far, source);
  LaneFarWords header;
  if (!await_far_header(call, far, LatencyKind::kCombine, sent, source, header)) return false;
  const bool same = import_header(call, far, LatencyKind::kCombine, sent, source, header);
  keeper.note(call, header);
  keeper.keep(call, far);  // while other blocks add
  if (!same && lane_idx() == 0) atomicAdd(&shared.num_others, 1U);
  if (!same || !params.send.own_weights) return true;
  const auto* const words = reinterpret_cast<const WideWord*>(
      far.inbox + far.layout.weights_at(static_cast<int>(sent.set), far.layout.far_idx(source)));
  const int num_words = num_weight_words(std::int64_t{call.tables.tokens_of_rank[source]} * call.num_topk);
  bool whole = true;
#pragma unroll 1
  for (int i = lane_idx(); i < num_words && whole; i += kWarpLanes) {
    whole = wait_payload(call, {Awaited::kEntry, source, sent.number}, &words[i].high).came;
  }
  return __all_sync(kAllLanes, static_cast<int>(whole)) != 0;
}

/// Waits until no rank stores to the call's set any more, and reports a rank that makes another call. Writes headers of
/// far ranks' messages into this rank's window. All threads of the first block; false in all of them when the group
/// broke.
__device__ inline bool import_small_headers(const SmallNodesCombineParams& params, const SentCall& sent,
                                            const SmallFarAdder& adder, SmallFarCombineShared& shared) {
  const LatencyParams& call = params.send.call;
  const FarParams& far = params.send.far;
  const int num_far = far.layout.num_far();
  static_assert(kSmallRanks < kCombineWarps);
  Outcome outcome = Outcome::kGo;
  bool whole = true;
  if (warp_idx() == 0) {
    outcome = adder.await_agreements(sent, false);
    whole = outcome != Outcome::kStop;
  } else if (warp_idx() <= num_far) {
    whole = import_small_header(params, sent, far.layout.far_rank(warp_idx() - 1), shared);
    if (lane_idx() == 0) atomicAdd(&shared.num_headers, 1U);
  } else if (warp_idx() == kCombineWarps) {
    const volatile unsigned& num_headers = shared.num_headers;
    keep_departures(call, far, [&num_headers, num_far] { return num_headers == static_cast<unsigned>(num_far); });
  }
  if (__syncthreads_and(static_cast<int>(whole)) == 0) return false;
  if (warp_idx() != 0 || (outcome == Outcome::kGo && shared.num_others == 0)) return true;
  return close_small_books(call, sent, call.tables.summary->valid != 0);
}

}  // namespace device
}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_SMALL_NODES_COMBINE_CUH
