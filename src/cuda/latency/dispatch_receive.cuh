#ifndef FERRY_CUDA_LATENCY_DISPATCH_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_DISPATCH_RECEIVE_CUH

/// The receive half of latency_dispatch. Blocks share the tokens of one source; a few warps take each token, find its
/// rows in the slab from the counts, and copy it there as soon as it has arrived. The first block writes what the host
/// and the Routing's views show.

#include <type_traits>

#include "cuda/latency/copy_rows.cuh"
#include "cuda/latency/far_message.hpp"
#include "cuda/latency/far_rows.cuh"
#include "cuda/latency/far_words.cuh"
#include "cuda/latency/receive_gaps.cuh"
#include "cuda/latency/receive_report.cuh"

namespace ferry::cuda::device {

__device__ inline DispatchSlot slot_of(const LatencyParams& call, const SentCall& sent, int source) {
  return DispatchSlot::at(
      own_window(call).slot(call.layout, LatencyKind::kDispatch, static_cast<int>(sent.set), source), call.max_tokens,
      call.num_topk);
}

/// Address of this lane's entry of a token of the arrival's source.
__device__ inline const std::uint64_t* entry_word(const LatencyParams& call, const SentCall& sent, int source,
                                                  std::int64_t token) {
  const int topk = lane_idx() < call.num_topk ? lane_idx() : 0;
  return slot_of(call, sent, source).entries + token * call.num_topk + topk;
}

/// Waits for a token's entries; false when the group broke. `seen`: this lane's word as loaded before. All lanes of a
/// warp.
template <typename Experts>
__device__ inline bool find_arrival(const LatencyParams& call, const SentCall& sent, const Experts& experts,
                                    std::uint64_t seen, Arrival& arrival) {
  const int lane = lane_idx();
  Payload entry{kNoExpert, true};
  if (lane < call.num_topk) {
    entry = wait_payload(call, {Awaited::kRow, arrival.source, sent.number},
                         entry_word(call, sent, arrival.source, arrival.token), seen);
  }
  if (__all_sync(kAllLanes, static_cast<int>(entry.came)) == 0) return false;
  if constexpr (requires { experts.counts; }) {
    const bool sound =
        entry.value == kNoExpert || entry_ordinal(entry.value) < experts.counts[entry_expert(entry.value)];
    if (__all_sync(kAllLanes, static_cast<int>(sound)) == 0) {
      if (lane == 0) refuse_message(call, arrival.source, sent.number);
      return false;
    }
  }
  int owner = -1;
  if (entry.value != kNoExpert) {
    const int home = experts.homes[entry_expert(entry.value)];
    owner = home_rank(home);
    const int row = experts.bases[entry_expert(entry.value)] + entry_ordinal(entry.value);
    arrival.slot = static_cast<int>(home_expert(home) * call.slab_capacity) + row;
    if (owner == call.ranks.rank) {
      arrival.expert = home_expert(home);
      arrival.row = row;
    }
  }
  const unsigned same_owner = __match_any_sync(kAllLanes, owner);
  const bool first_of_rank = owner >= 0 && __ffs(static_cast<int>(same_owner)) - 1 == lane;
  const unsigned below = __ballot_sync(kAllLanes, static_cast<int>(first_of_rank && owner < call.ranks.rank));
  // An expert's row holds one token, so the slot identifies the expert.
  const unsigned same_row = __match_any_sync(kAllLanes, arrival.expert < 0 ? -1 - lane : arrival.slot);
  const bool first_of_row = arrival.expert >= 0 && __ffs(static_cast<int>(same_row)) - 1 == lane;
  arrival.here = __ballot_sync(kAllLanes, static_cast<int>(first_of_row));
  if (arrival.here != 0) arrival.rank_ordinal = __popc(below);
  return true;
}

/// Address of this lane's weight of a token; null if there is none to keep.
__device__ inline const std::uint64_t* weight_word(const LatencyParams& call, const SentCall& sent,
                                                   const Arrival& arrival) {
  if (arrival.expert < 0 || call.tables.item_weights == nullptr) return nullptr;
  return slot_of(call, sent, arrival.source).weights + arrival.token * call.num_topk + lane_idx();
}

/// Writes the Routing's tables of a token; false when the group broke. All lanes of one warp. `seen`: word of this
/// lane's weight, if there is one, as loaded before.
__device__ inline bool keep_arrival(const LatencyParams& call, const SentCall& sent, const Arrival& arrival,
                                    std::uint64_t seen) {
  const LatencyTables& tables = call.tables;
  const int lane = lane_idx();
  const std::int64_t index = arrival.source * call.max_tokens + arrival.token;
  if (lane == 0) tables.rank_ordinals[index] = arrival.rank_ordinal;
  bool came = true;
  if (lane < call.num_topk) {
    const std::int64_t item = index * call.num_topk + lane;
    const std::int64_t entry = arrival.token * call.num_topk + lane;
    tables.items[item] = arrival.expert < 0 ? -1 : arrival.slot;
    if (arrival.source == call.ranks.rank) tables.slots[entry] = arrival.slot;
    if (const std::uint64_t* const word = weight_word(call, sent, arrival)) {
      const Payload weight = wait_payload(call, {Awaited::kRow, arrival.source, sent.number}, word, seen);
      came = weight.came;
      tables.item_weights[item] = __uint_as_float(weight.value);
    }
    if ((arrival.here >> lane & 1U) != 0) {
      reinterpret_cast<int2*>(tables.source)[arrival.slot] = make_int2(arrival.source, static_cast<int>(arrival.token));
    }
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// Tokens that a warp copies: those of `source` from `first` on, `step` apart.
struct WarpTokens {
  int source = 0;
  int first = 0;
  int step = 1;
  Share share;  ///< share of each row

  __device__ const std::uint64_t* first_entry(const LatencyParams& call, const SentCall& sent) const {
    const bool exists = source < call.ranks.num_ranks && first < call.max_tokens;
    return exists ? entry_word(call, sent, source, first) : nullptr;
  }
};

/// Rows of one source's tokens.
struct ArrivedRows {
  const std::byte* first = nullptr;  ///< rows that are words lie before each other, other rows behind
  bool by_flag = false;              ///< the flag of a token's row has its number; else that is the token's
  std::int64_t word_stride = 0;      ///< far_word_stride()
  /// In GPU memory: the word of the network behind rows that are no words; else null.
  const std::uint64_t* arrived = nullptr;

  /// `num_tokens`: of the source.
  template <typename Params>
  __device__ static ArrivedRows of(const LatencyParams& call, const Params& params, const SentCall& sent, int source,
                                   [[maybe_unused]] int num_tokens) {
    const auto set = static_cast<int>(sent.set);
    if constexpr (std::is_same_v<Params, FarDispatchReceiveParams>) {
      const FarParams& far = params.far;
      const FarMessage message = FarMessage::of(call.num_experts, call.num_topk);
      if (far.layout.is_far(source)) {
        const std::byte* const header = far.inbox + far.layout.header_at(0, set, far.layout.far_idx(source));
        const std::int64_t stride = far_word_stride(far.layout, params.row.stride(), num_tokens);
        const auto* const arrived = inbox_word(far, far.layout.arrived_at(0, source));
        if (stride == 0) return {header + FarMessage::kPlainRows, true, 0, far.layout.in_gpu ? arrived : nullptr};
        return {header + message.words(num_tokens, 1, stride), true, stride};
      }
    }
    return {own_window(call).rows(call.layout, LatencyKind::kDispatch, set) + source * call.layout.source_bytes, false};
  }
};

/// Receives a warp's part of one source's tokens; false when the group broke. `seen`: word of the first token's entry,
/// as loaded before. Params as in receive().
template <typename Params, typename Experts>
__device__ inline bool receive_tokens(const LatencyParams& call, const Params& params, const SentCall& sent,
                                      const Experts& experts, const ReceiveShared& shared, const WarpTokens& tokens,
                                      std::uint64_t seen) {
  const int source = tokens.source;
  const int end = shared.tokens[source];
  const ArrivedRows rows = ArrivedRows::of(call, params, sent, source, end);
  bool awaits_rows = rows.arrived != nullptr;
  const DispatchSlot slot = slot_of(call, sent, source);
#pragma unroll 1
  for (int token = tokens.first; token < end; token += tokens.step) {
    Arrival arrival;
    arrival.source = source;
    arrival.token = token;
    std::uint64_t seen_flag = 0;
    if constexpr (std::is_same_v<Params, FarDispatchReceiveParams>) {
      if (lane_idx() == 0) seen_flag = load_acquire_system(slot.row_flags + token);
    }
    if (!find_arrival(call, sent, experts, seen, arrival)) return false;
    if (token + tokens.step < end) {
      seen = load_relaxed_system(entry_word(call, sent, source, token + tokens.step));
    }
    const bool keeps = tokens.share.part == 0;
    const std::uint64_t* const weight = keeps ? weight_word(call, sent, arrival) : nullptr;
    const std::uint64_t seen_weight = weight != nullptr ? load_relaxed_system(weight) : 0;
    if (arrival.here != 0) {
      Payload flag{0, true};
      if (lane_idx() == 0) {
        if constexpr (!std::is_same_v<Params, FarDispatchReceiveParams>) {
          seen_flag = load_acquire_system(slot.row_flags + token);
        }
        flag = wait_payload(call, {Awaited::kRow, source, sent.number}, slot.row_flags + token, seen_flag);
      }
      if (__all_sync(kAllLanes, static_cast<int>(flag.came)) == 0) return false;
      __syncwarp();  // hands the first lane's acquired stores to all lanes
      std::int64_t row = token;
      if constexpr (std::is_same_v<Params, FarDispatchReceiveParams>) {
        const std::uint32_t number = __shfl_sync(kAllLanes, flag.value, 0);
        if (rows.by_flag) row = number;
        if (awaits_rows && !await_arrived(call, params.far, LatencyKind::kDispatch, sent.number, source)) return false;
        awaits_rows = false;
        if (rows.word_stride != 0) {
          const std::byte* const words = rows.first - row * rows.word_stride;
          if (!copy_row_words(call, params, sent, arrival, words, tokens.share) ||
              !copy_scale_words(call, params, sent, arrival, words, tokens.share)) {
            return false;
          }
        }
      }
      if (rows.word_stride == 0) copy_arrival(params, arrival, rows.first + row * params.row.stride(), tokens.share);
    }
    if (keeps && !keep_arrival(call, sent, arrival, seen_weight)) return false;
  }
  return true;
}

/// The first block of the grid reports, the others copy rows.
__device__ inline bool reports() { return blockIdx.x == 0; }
__device__ inline bool takes_part(const DispatchReceiveRows& params) {
  return reports() || static_cast<int>(blockIdx.x) >= params.first_receiver;
}

/// A warp's tokens of its first source; it then copies the same tokens of the source `step` further on, and so on.
struct SourceOrder {
  WarpTokens tokens;
  int step = 1;

  __device__ static SourceOrder of_block(int num_ranks, const DispatchReceiveRows& params) {
    const int num_blocks = static_cast<int>(gridDim.x) - params.first_receiver - params.num_gap_blocks;
    const int per_source = num_blocks >= num_ranks ? num_blocks / num_ranks : 1;
    const int block = static_cast<int>(blockIdx.x) - params.first_receiver;
    SourceOrder order;
    order.step = num_blocks / per_source;
    order.tokens.source = reports() || block >= num_blocks ? num_ranks : block / per_source;
    order.tokens.first = warp_idx() / params.warps_per_row * per_source + block % per_source;
    order.tokens.step = per_source * (kReceiveWarps / params.warps_per_row);
    order.tokens.share = {warp_idx() % params.warps_per_row, params.warps_per_row};
    return order;
  }
};

/// First words of each kind that a thread needs, loaded together before it is known whether all ranks make the call.
struct FirstLook {
  std::uint64_t header = 0;
  CountsLook counts;
  std::uint64_t entry = 0;

  /// Looks until headers and counts have arrived, so that the waits that follow, one after the other, end at once; at
  /// most so many times. Looks once if waits are counted, since these looks are not counted.
  __device__ void load(const LatencyParams& call, const SentCall& sent, const WarpTokens& tokens, int most) {
    const int most_looks = call.counts_waits ? 1 : most;
    const auto set = static_cast<int>(sent.set);
    const auto expert = static_cast<int>(threadIdx.x);
    const std::uint64_t* const header_at = first_header_word(call, LatencyKind::kDispatch, set);
    const std::uint64_t* const counts_at = count_words(call, call.ranks.rank, set, 0);
    const std::uint64_t* const entry_at = tokens.first_entry(call, sent);
#pragma unroll 1
    for (int looks = 0; looks < most_looks; ++looks) {
      if (header_at != nullptr) header = load_relaxed_system(header_at);
      if (expert < call.num_experts) counts.load(call, counts_at, expert, 0);
      if (entry_at != nullptr) entry = load_relaxed_system(entry_at);
      const bool headers = header_at == nullptr || is_word_of(header, sent.number);
      const bool all = headers && (expert >= call.num_experts || counts.are_of(call.ranks.num_ranks, sent.number));
      if (__all_sync(kAllLanes, static_cast<int>(all)) != 0) return;
    }
  }
};

/// Most looks of FirstLook. More between nodes, where a message takes some 10 us and not one; no other numbers were
/// tried.
inline constexpr int kMostLooks = 32;
inline constexpr int kMostFarLooks = 128;

/// Home of the expert with the index of this thread, loaded ahead.
struct HomesLook {
  std::int32_t owner = 0;
  std::int32_t local_expert = 0;

  __device__ HomesLook() {}
  __device__ HomesLook(const LatencyParams& call, const DispatchReceiveRows& params) {
    const auto expert = static_cast<int>(threadIdx.x);
    if (expert >= call.num_experts) return;
    owner = params.placement.owner[expert];
    local_expert = params.placement.local_expert[expert];
  }
};

/// Prepares a block's shared memory. All threads; a barrier must follow.
__device__ inline void prepare_receive(const LatencyParams& call, const DispatchReceiveRows& params,
                                       const HomesLook& look, const ExpertTables& experts, ReceiveShared& shared) {
  auto expert = static_cast<int>(threadIdx.x);
  if (expert < call.num_experts) experts.homes[expert] = home_of(look.owner, look.local_expert);
#pragma unroll 1
  for (expert += kDispatchThreads; expert < call.num_experts; expert += kDispatchThreads) {
    experts.homes[expert] = home_of(params.placement.owner[expert], params.placement.local_expert[expert]);
  }
  if (threadIdx.x != 0) return;
  shared.first_bad_rank = kNone;
  shared.first_other_rank = kNone;
  shared.first_full_expert = kNone;
  if (reports() && params.host.result != nullptr) store_relaxed_system(&params.host.result->started, 1);
}

/// Waits for the headers of all ranks and compares them. `look`: words loaded before.
template <bool kHomes>
__device__ inline Outcome begin_receive(const LatencyParams& call, const DispatchReceiveRows& params,
                                        const SentCall& sent, ReceiveShared& shared, const FirstLook& look) {
  std::uint64_t homes_hash = 0;
  if constexpr (kHomes) homes_hash = hash_of_homes(params.placement);
  const auto take = [&shared, homes_hash](int rank, const ReceivedHeader& header) {
    const std::int64_t num_tokens = header.num_tokens();
    const std::int64_t bad_entry = header.bad_entry();
    bool other_homes = false;
    if constexpr (kHomes) other_homes = header.homes_hash() != homes_hash;
    if (lane_idx() != 0) return;
    if (other_homes) atomicMin(&shared.first_other_rank, static_cast<unsigned>(rank));
    shared.tokens[rank] = static_cast<std::int32_t>(num_tokens);
    if (bad_entry >= 0) atomicMin(&shared.first_bad_rank, static_cast<unsigned>(rank));
  };
  return await_headers(call, LatencyKind::kDispatch, static_cast<int>(sent.set), sent.number, take, &look.header);
}

/// Receives a call that all ranks make alike; false when the group broke. Params: DispatchReceiveRows, or a type with
/// more members (is_left_out), or FarDispatchReceiveParams in groups of several nodes.
template <bool kHomes, typename Params, typename Experts>
__device__ inline bool receive(const LatencyParams& call, const Params& params, const SentCall& sent,
                               const Experts& experts, ReceiveShared& shared, SourceOrder& order,
                               const FirstLook& look) {
  const int num_ranks = call.ranks.num_ranks;
  WarpTokens& tokens = order.tokens;
  if (reports()) begin_report(call, shared);
  bool whole = true;
  bool cleared = !clears_gaps(params);
  std::uint64_t entry = look.entry;
  // A block without a source runs this once too: every block needs the counts, at least to find the rows that are gaps.
#pragma unroll 1
  do {
    const CountsUse use{tokens.source, reports() ? call.tables.source_ranges : nullptr};
    if (!sum_counts(call, sent, experts, shared, use, look.counts)) return false;
    if (shared.first_full_expert != kNone) return true;
    if (!cleared) clear_sources(call, params, experts);  // while rows are on their way
    if (tokens.source < num_ranks) whole = receive_tokens(call, params, sent, experts, shared, tokens, entry);
    if (!cleared && params.zero_padding) clear_rows(call, params, experts);
    cleared = true;
    tokens.source += order.step;
    if (const std::uint64_t* word = tokens.first_entry(call, sent)) entry = load_relaxed_system(word);
    whole = __syncthreads_and(static_cast<int>(whole)) != 0;  // all threads have read the bases of this source
  } while (whole && tokens.source < num_ranks);
  if (whole && reports()) report_counts<kHomes>(call, params, sent, experts, shared);
  return whole;
}

/// Receives the call, or reports why it is refused. All threads of all blocks; false in all of them when the group
/// broke. `kHomes`: the call may have a placement in which experts have several homes, or counters; other kernels hold
/// none of that code.
template <bool kHomes, typename Params, typename Experts>
__device__ inline bool receive_dispatch(const LatencyParams& call, const Params& params, const SentCall& sent,
                                        const Experts& experts, ReceiveShared& shared) {
  SourceOrder order = SourceOrder::of_block(call.ranks.num_ranks, params);
  FirstLook look;
  constexpr bool kNodes = std::is_same_v<Params, FarDispatchReceiveParams>;
  look.load(call, sent, order.tokens, kNodes ? kMostFarLooks : kMostLooks);
  const Outcome outcome = begin_receive<kHomes>(call, params, sent, shared, look);
  if (outcome == Outcome::kStop) return false;
  const bool agreed =
      outcome == Outcome::kGo && shared.first_bad_rank == kNone && (!kHomes || shared.first_other_rank == kNone);
  if (agreed && !receive<kHomes>(call, params, sent, experts, shared, order, look)) return false;
  if (reports() && threadIdx.x == 0 && (!agreed || shared.first_full_expert != kNone)) {
    report_refused<kHomes>(call, params, sent, shared, outcome);
  }
  return true;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_DISPATCH_RECEIVE_CUH
