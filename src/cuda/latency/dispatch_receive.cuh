#ifndef FERRY_CUDA_LATENCY_DISPATCH_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_DISPATCH_RECEIVE_CUH

/// The receive half of latency_dispatch. Blocks share the tokens of one source; a few warps take each, find its rows in
/// the slab from the counts, and copy it there as soon as it has come. The first block writes what the host and the
/// Routing's views show.

#include "cuda/latency/dispatch_threads.hpp"
#include "cuda/latency/receive_report.cuh"

namespace ferry::cuda::device {

inline constexpr int kReceiveWarps = kDispatchThreads / kWarpLanes;
/// Loads of a lane that are on their way together.
inline constexpr int kReceiveUnroll = 2;

/// What a warp knows of a token: lane k of its entry k.
struct Arrival {
  int source = 0;
  std::int64_t token = 0;
  int expert = -1;        ///< index among this rank's experts, -1: not here
  int row = -1;           ///< in that expert's slab
  unsigned here = 0;      ///< lanes that are the first of a row of this rank
  int rank_ordinal = -1;  ///< ranks below this one that the token goes to
  int slot = -1;          ///< row in the slab of the entry's rank, wherever that is
};

/// A part of the copy of a row: `parts` warps share it.
struct Share {
  int part = 0;
  int parts = 1;
};

__device__ inline DispatchSlot slot_of(const LatencyParams& call, const SentCall& sent, int source) {
  return DispatchSlot::at(
      own_window(call).slot(call.layout, LatencyKind::kDispatch, static_cast<int>(sent.set), source), call.max_tokens,
      call.num_topk);
}

/// The word of this lane's entry of a token of the arrival's source.
__device__ inline const std::uint64_t* entry_word(const LatencyParams& call, const SentCall& sent, int source,
                                                  std::int64_t token) {
  const int topk = lane_idx() < call.num_topk ? lane_idx() : 0;
  return slot_of(call, sent, source).entries + token * call.num_topk + topk;
}

/// Waits for a token's entries, of whose word this lane has `seen` something; false when the group broke. All lanes of
/// a warp.
__device__ inline bool find_arrival(const LatencyParams& call, const SentCall& sent, const ExpertTables& experts,
                                    std::uint64_t seen, Arrival& arrival) {
  const int lane = lane_idx();
  Payload entry{kNoExpert, true};
  if (lane < call.num_topk) {
    entry = wait_payload(call.ranks, {Awaited::kRow, arrival.source, sent.number},
                         entry_word(call, sent, arrival.source, arrival.token), seen);
  }
  if (__all_sync(kAllLanes, static_cast<int>(entry.came)) == 0) return false;
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
  // An expert's row holds one token, so the slot tells entries of one expert from others.
  const unsigned same_row = __match_any_sync(kAllLanes, arrival.expert < 0 ? -1 - lane : arrival.slot);
  const bool first_of_row = arrival.expert >= 0 && __ffs(static_cast<int>(same_row)) - 1 == lane;
  arrival.here = __ballot_sync(kAllLanes, static_cast<int>(first_of_row));
  if (arrival.here != 0) arrival.rank_ordinal = __popc(below);
  return true;
}

/// The word of this lane's weight of a token; null where there is none to keep.
__device__ inline const std::uint64_t* weight_word(const LatencyParams& call, const SentCall& sent,
                                                   const Arrival& arrival) {
  if (arrival.expert < 0 || call.tables.item_weights == nullptr) return nullptr;
  return slot_of(call, sent, arrival.source).weights + arrival.token * call.num_topk + lane_idx();
}

/// Writes what the Routing keeps of a token; false when the group broke. All lanes of one warp. `seen`: at the word of
/// this lane's weight, if there is one. A rehearsal writes what the same lanes write once more.
__device__ inline bool keep_arrival(const LatencyParams& call, const SentCall& sent, const Arrival& arrival,
                                    std::uint64_t seen, bool rehearses) {
  const LatencyTables& tables = call.tables;
  const int lane = lane_idx();
  const std::int64_t index = arrival.source * call.max_tokens + arrival.token;
  if (lane == 0) tables.rank_ordinals[index] = arrival.rank_ordinal;
  bool came = true;
  if (lane < call.num_topk) {
    const std::int64_t item = index * call.num_topk + lane;
    const std::int64_t entry = arrival.token * call.num_topk + lane;
    tables.items[item] = arrival.expert < 0 ? -1 : arrival.slot;
    if (arrival.source == call.ranks.rank && !rehearses) tables.slots[entry] = arrival.slot;
    if (const std::uint64_t* const word = weight_word(call, sent, arrival)) {
      const Payload weight = wait_payload(call.ranks, {Awaited::kRow, arrival.source, sent.number}, word, seen);
      came = weight.came;
      tables.item_weights[item] = __uint_as_float(weight.value);
    }
    if ((arrival.here >> lane & 1U) != 0 && !rehearses) {
      reinterpret_cast<int2*>(tables.source)[arrival.slot] = make_int2(arrival.source, static_cast<int>(arrival.token));
    }
  }
  return __all_sync(kAllLanes, static_cast<int>(came)) != 0;
}

/// Copies this warp's share of a row that has come to all its rows in the slab. A rehearsal goes through each loop
/// once, and copies nothing.
__device__ inline void copy_arrival(const DispatchReceiveRows& params, const Arrival& arrival,
                                    const std::byte* window_row, const Share& share, bool rehearses) {
  const int lane = lane_idx();
  const auto* from = reinterpret_cast<const uint4*>(window_row);
  const auto num_units = static_cast<int>(params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4)));
  const int count = rehearses ? 0 : num_units;
  constexpr int kStep = kReceiveUnroll * kWarpLanes;
  const int step = rehearses ? num_units : share.parts * kStep;
#pragma unroll 1
  for (int first = share.part * kStep; first < num_units; first += step) {
    uint4 values[kReceiveUnroll];
#pragma unroll
    for (int i = 0; i < kReceiveUnroll; ++i) {
      const int at = first + i * kWarpLanes + lane;
      if (at < count) values[i] = from[at];
    }
#pragma unroll 1
    for (unsigned left = arrival.here; left != 0; left &= left - 1) {
      const std::int64_t slot = __shfl_sync(kAllLanes, arrival.slot, __ffs(static_cast<int>(left)) - 1);
      auto* to = reinterpret_cast<uint4*>(params.x + slot * params.x_stride);
#pragma unroll
      for (int i = 0; i < kReceiveUnroll; ++i) {
        const int at = first + i * kWarpLanes + lane;
        if (at < count) to[at] = values[i];
      }
    }
  }
  const SlabScales& scales = params.scales;
  const std::byte* const scale_row = window_row + params.row.scales_offset();
#pragma unroll 1
  for (int first = share.part * kWarpLanes; first < params.row.num_scales; first += share.parts * kWarpLanes) {
    const int column = first + lane;
    const bool mine = column < params.row.num_scales && !rehearses;
    const bool words = params.row.scale_bytes == sizeof(std::uint32_t);
    std::uint32_t value = 0;
    if (mine && words) value = reinterpret_cast<const std::uint32_t*>(scale_row)[column];
    if (mine && !words) value = static_cast<std::uint32_t>(scale_row[column]);
#pragma unroll 1
    for (unsigned left = arrival.here; left != 0; left &= left - 1) {
      const int from_lane = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t expert = __shfl_sync(kAllLanes, arrival.expert, from_lane);
      const std::int64_t row = __shfl_sync(kAllLanes, arrival.row, from_lane);
      const std::int64_t at = expert * scales.expert_stride + row * scales.row_stride + column * scales.column_stride;
      if (mine && words) reinterpret_cast<std::uint32_t*>(scales.data)[at] = value;
      if (mine && !words) scales.data[at] = static_cast<std::byte>(value);
    }
  }
}

/// What a warp of a block copies: tokens of `source` from `first` on, `step` apart.
struct WarpTokens {
  int source = 0;
  int first = 0;
  int step = 1;
  Share share;  ///< of each row

  __device__ const std::uint64_t* first_entry(const LatencyParams& call, const SentCall& sent) const {
    const bool exists = source < call.ranks.num_ranks && first < call.max_tokens;
    return exists ? entry_word(call, sent, source, first) : nullptr;
  }
};

/// A warp's part of one source's tokens. `seen`: at the first one's entry. False when the group broke. A rehearsal goes
/// through what is done with one token, which may not exist.
__device__ inline bool receive_tokens(const LatencyParams& call, const DispatchReceiveRows& params,
                                      const SentCall& sent, const ExpertTables& experts, const ReceiveShared& shared,
                                      const WarpTokens& tokens, std::uint64_t seen, bool rehearses) {
  const int source = tokens.source;
  const std::byte* const rows = own_window(call).rows(call.layout, LatencyKind::kDispatch, static_cast<int>(sent.set)) +
                                source * call.layout.source_bytes;
  const DispatchSlot slot = slot_of(call, sent, source);
  const int end = rehearses ? tokens.first + 1 : shared.tokens[source];
#pragma unroll 1
  for (int token = tokens.first; token < end; token += tokens.step) {
    Arrival arrival;
    arrival.source = source;
    arrival.token = token;
    if (!find_arrival(call, sent, experts, seen, arrival)) return false;
    if (rehearses) {
      arrival.expert = -1;
      arrival.here = 1;
    }
    if (token + tokens.step < end) {
      seen = load_relaxed_system(entry_word(call, sent, source, token + tokens.step));
    }
    const bool keeps = tokens.share.part == 0;
    const std::uint64_t* const weight = keeps ? weight_word(call, sent, arrival) : nullptr;
    const std::uint64_t seen_weight = weight != nullptr ? load_relaxed_system(weight) : 0;
    if (arrival.here != 0) {
      bool came = true;
      if (lane_idx() == 0) {
        const std::uint64_t* const flag = slot.row_flags + token;
        std::uint64_t seen_flag = load_acquire_system(flag);
        if (rehearses) seen_flag = make_word(sent.number, 0);
        came = wait_payload(call.ranks, {Awaited::kRow, source, sent.number}, flag, seen_flag).came;
      }
      if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) return false;
      __syncwarp();  // hands what the first lane has acquired to all of them
      copy_arrival(params, arrival, rows + token * params.row.stride(), tokens.share, rehearses);
    }
    if (keeps && !keep_arrival(call, sent, arrival, seen_weight, rehearses)) return false;
  }
  return true;
}

/// The row of the slab with index `row` of all experts' holds no token. A warp clears it.
__device__ inline void clear_row(const DispatchReceiveRows& params, int row, int capacity) {
  auto* x = reinterpret_cast<uint4*>(params.x + row * params.x_stride);
  const std::int64_t count = params.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4));
#pragma unroll 1
  for (std::int64_t i = lane_idx(); i < count; i += kWarpLanes) x[i] = make_uint4(0, 0, 0, 0);
  const SlabScales& scales = params.scales;
  const int expert = row / capacity;
#pragma unroll 1
  for (int column = lane_idx(); column < params.row.num_scales; column += kWarpLanes) {
    const std::int64_t at =
        expert * scales.expert_stride + (row - expert * capacity) * scales.row_stride + column * scales.column_stride;
    if (params.row.scale_bytes == sizeof(std::uint32_t)) {
      reinterpret_cast<std::uint32_t*>(scales.data)[at] = 0;
    } else {
      scales.data[at] = std::byte{0};
    }
  }
}

/// Rows of the slab that hold no token, which the blocks that copy rows share, `step` apart for `worker`.
struct SlabGaps {
  int first = 0;
  int step = 1;
  int num_rows = 0;  ///< so few that all fit 32 bits
  int capacity = 1;

  __device__ static SlabGaps of(const LatencyParams& call, int first_receiver, int worker, int workers_per_block) {
    const auto capacity = static_cast<int>(call.slab_capacity);
    const int block = static_cast<int>(blockIdx.x) - first_receiver;
    return {block * workers_per_block + worker, (static_cast<int>(gridDim.x) - first_receiver) * workers_per_block,
            call.num_local_experts * capacity, capacity};
  }
  __device__ bool is_gap(const ExpertTables& experts, int row) const {
    const int expert = row / capacity;
    return row - expert * capacity >= experts.local_rows[expert];
  }
};

/// Writes that they hold none.
__device__ inline void clear_sources(const LatencyParams& call, const DispatchReceiveRows& params,
                                     const ExpertTables& experts) {
  const SlabGaps gaps = SlabGaps::of(call, params.first_receiver, static_cast<int>(threadIdx.x), kDispatchThreads);
#pragma unroll 1
  for (int row = gaps.first; row < gaps.num_rows; row += gaps.step) {
    if (gaps.is_gap(experts, row)) reinterpret_cast<int2*>(call.tables.source)[row] = make_int2(-1, -1);
  }
}

/// Clears them. Warps.
__device__ inline void clear_rows(const LatencyParams& call, const DispatchReceiveRows& params,
                                  const ExpertTables& experts) {
  const SlabGaps gaps = SlabGaps::of(call, params.first_receiver, warp_idx(), kReceiveWarps);
#pragma unroll 1
  for (int row = gaps.first; row < gaps.num_rows; row += gaps.step) {
    if (gaps.is_gap(experts, row)) clear_row(params, row, gaps.capacity);
  }
}

/// The first block of the grid reports, and others copy rows.
__device__ inline bool reports() { return blockIdx.x == 0; }
__device__ inline bool takes_part(const DispatchReceiveRows& params) {
  return reports() || static_cast<int>(blockIdx.x) >= params.first_receiver;
}

/// What this warp copies first; then the same of the source `step` further on, and so on.
struct SourceOrder {
  WarpTokens tokens;
  int step = 1;

  __device__ static SourceOrder of_block(int num_ranks, const DispatchReceiveRows& params) {
    const int num_blocks = static_cast<int>(gridDim.x) - params.first_receiver;
    const int per_source = num_blocks >= num_ranks ? num_blocks / num_ranks : 1;
    const int block = static_cast<int>(blockIdx.x) - params.first_receiver;
    SourceOrder order;
    order.step = num_blocks / per_source;
    order.tokens.source = reports() ? num_ranks : block / per_source;
    order.tokens.first = warp_idx() / params.warps_per_row * per_source + block % per_source;
    order.tokens.step = per_source * (kReceiveWarps / params.warps_per_row);
    order.tokens.share = {warp_idx() % params.warps_per_row, params.warps_per_row};
    return order;
  }
};

/// What a thread looks at before it knows whether the call is made: all that it needs first, at once.
struct FirstLook {
  std::uint64_t header = 0;
  CountsLook counts;
  std::uint64_t entry = 0;

  /// As if nobody had any tokens.
  __device__ void rehearse(std::uint64_t number) {
#pragma unroll
    for (std::uint64_t& word : counts.words) word = make_word(number, 0);
  }

  /// Looks until headers and counts are there, or for a while.
  __device__ void load(const LatencyParams& call, const SentCall& sent, const WarpTokens& tokens) {
    constexpr int kLooks = 32;  // of less than a microsecond
    const auto set = static_cast<int>(sent.set);
    const auto expert = static_cast<int>(threadIdx.x);
    const std::uint64_t* const header_at = first_header_word(call, LatencyKind::kDispatch, set);
    const std::uint64_t* const counts_at = count_words(call, call.ranks.rank, set, 0);
    const std::uint64_t* const entry_at = tokens.first_entry(call, sent);
#pragma unroll 1
    for (int looks = 0; looks < kLooks; ++looks) {
      if (header_at != nullptr) header = load_relaxed_system(header_at);
      if (expert < call.num_experts) counts.load(call, counts_at, expert, 0);
      if (entry_at != nullptr) entry = load_relaxed_system(entry_at);
      const bool headers = header_at == nullptr || is_word_of(header, sent.number);
      const bool all = headers && (expert >= call.num_experts || counts.are_of(call.ranks.num_ranks, sent.number));
      if (__all_sync(kAllLanes, static_cast<int>(all)) != 0) return;
    }
  }
};

/// Where the expert with the index of this thread is, loaded ahead.
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

/// What a block needs before it receives. All threads; a barrier must follow.
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

/// Waits for the headers of all ranks, of which `look` has seen some, and compares them.
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

/// Receives the call, or reports why nobody does. All threads of all blocks; false in all of them when the group broke.
/// `kHomes`: the call may have a placement in which experts have several homes, or counters; others hold none of the
/// code for that. Params: DispatchReceiveRows, or what has more (is_left_out).
///
/// A warp that `rehearses`, while nothing has come yet, goes through the steps that follow, with counts of 0 and one
/// token that is not there. What code and parameters its multiprocessor has not run and read yet it then has, which
/// takes longer than the steps themselves; and nobody sees anything of it.
template <bool kHomes, typename Params>
__device__ inline bool receive_dispatch(const LatencyParams& call, const Params& params, const SentCall& sent,
                                        const ExpertTables& experts, ReceiveShared& shared, bool rehearses) {
  const int num_ranks = call.ranks.num_ranks;
  SourceOrder order = SourceOrder::of_block(num_ranks, params);
  WarpTokens& tokens = order.tokens;
  FirstLook look;
  std::uint64_t entry = 0;
  rehearses = rehearses && tokens.source < num_ranks && tokens.first < call.max_tokens;
  bool begins = true;
  bool cleared = reports();
  bool whole = true;
  // Every block needs the counts, if only to know what rows are gaps; so one without a source goes through here too.
#pragma unroll 1
  do {
    if (rehearses) {
      look.rehearse(sent.number);
      entry = make_word(sent.number, pack_entry(0, 0));
    } else if (begins) {
      look.load(call, sent, tokens);
      entry = look.entry;
      const Outcome outcome = begin_receive<kHomes>(call, params, sent, shared, look);
      if (outcome == Outcome::kStop) return false;
      const bool other_homes = kHomes && shared.first_other_rank != kNone;
      if (outcome != Outcome::kGo || shared.first_bad_rank != kNone || other_homes) {
        if (reports() && threadIdx.x == 0) report_refused<kHomes>(call, params, sent, shared, outcome);
        return true;
      }
      if (reports()) begin_report(call, shared);
      begins = false;
    }
    const CountsUse use{tokens.source, reports() ? call.tables.source_ranges : nullptr, rehearses};
    if (!sum_counts(call, sent, experts, shared, use, look.counts)) return false;
    if (!rehearses && shared.first_full_expert != kNone) {
      if (reports() && threadIdx.x == 0) report_refused<kHomes>(call, params, sent, shared, Outcome::kGo);
      return true;
    }
    if (!cleared && !rehearses) clear_sources(call, params, experts);  // while rows are on their way
    if (tokens.source < num_ranks) {
      whole = receive_tokens(call, params, sent, experts, shared, tokens, entry, rehearses);
    }
    if (rehearses) {
      rehearses = false;
      continue;
    }
    if (!cleared && params.zero_padding) clear_rows(call, params, experts);
    cleared = true;
    tokens.source += order.step;
    if (const std::uint64_t* word = tokens.first_entry(call, sent)) entry = load_relaxed_system(word);
    whole = __syncthreads_and(static_cast<int>(whole)) != 0;  // nobody reads the bases of this source any more
  } while (whole && (begins || tokens.source < num_ranks));
  if (whole && reports()) report_counts<kHomes>(call, params, sent, experts, shared);
  return whole;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_DISPATCH_RECEIVE_CUH
