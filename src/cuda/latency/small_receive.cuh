#ifndef FERRY_CUDA_LATENCY_SMALL_RECEIVE_CUH
#define FERRY_CUDA_LATENCY_SMALL_RECEIVE_CUH

/// The receive half of a small dispatch: one warp or a few receive a row; the first block reports.

#include "cuda/latency/far_keeper.cuh"
#include "cuda/latency/small_parts.cuh"

namespace ferry::cuda::device {

/// Counts of one expert, of all ranks.
struct SmallCounts {
  std::uint64_t words[kSmallRanks] = {};
};

/// Prepares a receive half that is a kernel of its own; false if there is nothing to receive. `sent`: as its send half
/// has left it. All threads of a block.
__device__ inline bool begin_small_receive(const LatencyParams& call, const DispatchReceiveRows& params,
                                           SmallShared& shared, const ReceiveMemory& memory, const SentCall& sent) {
  prepare_receive(call, params, HomesLook(call, params), memory.experts, *memory.shared);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < call.ranks.num_ranks) memory.shared->from_rank[thread] = memory.shared->to_rank[thread] = 0;
  if (thread == 0) {
    shared.number = sent.number;
    shared.sets[call.ranks.rank] = static_cast<int>(sent.set);
    shared.other_call = 0;
  }
  // A send half that found the group broken has not written the words of `sent`.
  if (__syncthreads_or(static_cast<int>(is_broken(call.ranks))) != 0) return false;
  if (sent.pending == 0 && reports() && thread == 0) report_not_sent(call);
  return sent.pending != 0;
}

/// A receive half's part for ranks of other nodes, in groups of one node: nothing. See SmallFarReceiver.
struct NoSmallFarReceiver {
  static constexpr bool kPresent = false;
};

/// `kHalf`: the kernel makes a receive half alone, and leaves it. Far: NoSmallFarReceiver, or SmallFarReceiver in
/// groups of several nodes.
template <bool kHalf = false, typename Far = NoSmallFarReceiver>
class SmallReceiver {
 public:
  __device__ SmallReceiver(const LatencyParams& call, const DispatchReceiveRows& params, SmallShared& shared,
                           const ReceiveMemory& memory, const Far& far = {})
      : far_(far),
        call_(call),
        params_(params),
        shared_(shared),
        memory_(memory),
        number_(shared.number),
        set_(shared.sets[call.ranks.rank]),
        tokens_(SourceOrder::of_block(call.ranks.num_ranks, params).tokens) {}

  /// All threads of a block that takes part; false in all of them when the group broke.
  __device__ bool receive() {
    if (reports()) note_offsets();
    SmallCounts counts;
    std::uint64_t entry = 0;
    const bool came = look(counts, entry);
    add_up(counts);
    if (__syncthreads_or(static_cast<int>(!came)) != 0) return false;
    const bool refused = shared_.other_call != 0 || memory_.shared->first_bad_rank != kNone ||
                         memory_.shared->first_full_expert != kNone;
    if constexpr (Far::kPresent) {
      if (bad_source_ >= 0 && !refused) far_.refuse(bad_source_);
    }
    if (reports()) {
      if constexpr (Far::kPresent) far_.keep(keeper_);  // the warps of headers report nothing
      report(refused);
      return true;
    }
    if (refused) return true;
    if (clears_gaps(params_)) clear_sources(call_, params_, memory_.experts);
    if (tokens_.source >= call_.ranks.num_ranks || tokens_.first >= memory_.shared->tokens[tokens_.source]) return true;
    if constexpr (Far::kPresent) {
      if (far_.is_far(tokens_.source)) return receive_far_row();
    }
    return receive_row(entry);
  }

  __device__ SentCall sent_call() const { return {number_, static_cast<std::uint32_t>(set_), 1, 0}; }

 private:
  /// Words that this thread looks for, one bit each: the counts of each rank, then the word of a header.
  static constexpr unsigned kHeaderBit = 1U << kSmallRanks;

  /// Polls headers and counts until all have arrived; false when the group broke. `entry`: this lane's entry as last
  /// loaded. The last warps also look for one rank's header each, and note its contents.
  __device__ bool look(SmallCounts& counts, std::uint64_t& entry) {
    constexpr int kLooks = 64;  // together less than a microsecond; the deadline starts later
    const int most_looks = call_.counts_waits ? 1 : kLooks;  // looks are not counted as waits
    const int num_ranks = call_.ranks.num_ranks;
    const auto thread = static_cast<int>(threadIdx.x);
    const int header_rank = kReceiveWarps - 1 - warp_idx();
    bool header_is_far = false;
    if constexpr (Far::kPresent) header_is_far = far_.is_far(header_rank);
    const bool has_header =
        header_rank < num_ranks && lane_idx() < (header_is_far ? kFarHeaderWords : kLatencyHeaderWords);
    const std::uint64_t* header_at =
        header_words(call_, call_.ranks.rank, LatencyKind::kDispatch, set_, has_header ? header_rank : 0) +
        (has_header ? lane_idx() : 0);
    LaneFarWords far_header;
    if constexpr (Far::kPresent) {
      if (header_is_far && has_header) header_at = far_.header_number(header_rank);
      if (header_is_far && reports()) keeper_ = far_.keeper(header_rank);
    }
    const bool has_counts = thread < call_.num_experts;
    bool wants_counts = has_counts;
    const std::uint64_t* const counts_at = count_words(call_, call_.ranks.rank, set_, 0) + (has_counts ? thread : 0);
    const std::uint64_t* const entry_at =
        has_token() ? entry_word(call_, sent_call(), tokens_.source, tokens_.first) : nullptr;
    std::uint64_t header = 0;
    bool came = true;
#pragma unroll 1
    for (int looks = 0;; ++looks) {
      if (has_header && !header_is_far) header = load_relaxed_system(header_at);
      if constexpr (Far::kPresent) {
        if (header_is_far) header = load_far_header(header_rank, far_header);
      }
      unsigned missing = 0;
#pragma unroll
      for (int i = 0; i < kSmallRanks; ++i) {
        if (!wants_counts || i >= num_ranks) continue;
        if constexpr (Far::kPresent) {
          if (far_.is_far(i)) {
            counts.words[i] = far_.load_count(i, thread);
            continue;
          }
        }
        counts.words[i] = load_relaxed_system(counts_at + i * kMaxExperts);
      }
      if (entry_at != nullptr) entry = load_relaxed_system(entry_at);
      if constexpr (Far::kPresent) {
        if (has_token() && far_.is_far(tokens_.source)) record_ = far_.load_record(tokens_.source, tokens_.first);
      }
#pragma unroll
      for (int i = 0; i < kSmallRanks; ++i) {
        if (wants_counts && i < num_ranks && !is_word_of(counts.words[i], number_)) missing |= 1U << i;
      }
      if (has_header && !is_word_of(header, number_)) missing |= kHeaderBit;
      if (__any_sync(kAllLanes, static_cast<int>(missing != 0)) == 0) break;
      if (looks < most_looks) continue;
      if constexpr (Far::kPresent) {
        // The next look imports the header, which lanes that wait for counts look at (await_unless_other).
        const bool no_header = __any_sync(kAllLanes, static_cast<int>((missing & kHeaderBit) != 0)) != 0;
        if (header_is_far && no_header) missing &= kHeaderBit;
      }
      bool other = false;
      if (missing != 0) came = await_first(missing, header_rank, header_at, counts_at, other);
      if (__all_sync(kAllLanes, static_cast<int>(came)) == 0) break;
      // A rank that refuses the call sends no counts, and a refused call needs none.
      if (__any_sync(kAllLanes, static_cast<int>(other)) != 0) wants_counts = false;
    }
    auto header_payload = payload_of(header);
    if constexpr (Far::kPresent) {
      if (header_is_far && __all_sync(kAllLanes, static_cast<int>(came)) != 0) {
        came = far_.note(header_rank, far_header);
        header_payload = far_header.payload(lane_idx());
        if (reports()) keeper_.note(call_, far_header);
      }
      if (header_is_far && reports()) far_.end_header();
      if (header_rank == call_.ranks.rank && reports()) far_.keep_departures();
    }
    if constexpr (Far::kPresent) {
#pragma unroll
      for (int i = 0; i < kSmallRanks; ++i) {
        if (!has_counts || !far_.is_far(i) || payload_of(counts.words[i]) <= most_rows()) continue;
        counts.words[i] = make_word(number_, most_rows());
        bad_source_ = i;
      }
    }
    if (came && has_header) note_header(header_rank, header_payload);
    return came;
  }

  /// Most rows that a rank sends for an expert: no rank of this build sends more.
  __device__ std::uint32_t most_rows() const { return static_cast<std::uint32_t>(call_.max_tokens); }

  /// Loads the words of a far rank's header; in the block that reports also imports them, once they are there. Returns
  /// this lane's half that has the number. All lanes of a warp.
  __device__ std::uint64_t load_far_header(int rank, LaneFarWords& header) {
    header = far_.load_header(rank);
    const std::uint64_t half = header.own().high;
    const bool here = lane_idx() >= kFarHeaderWords || is_word_of(half, number_);
    const bool all = __all_sync(kAllLanes, static_cast<int>(here)) != 0;
    if (all && reports() && !imported_) far_.import(rank, header);
    imported_ = imported_ || all;
    return half;
  }

  /// Waits for the first missing word; false when the group broke. The header is waited for before counts: it comes
  /// first, and where threads have both, no other thread counts the wait for its rank unless that is the first rank
  /// whose counts they miss. `other`: the word's rank makes another call.
  __device__ bool await_first(unsigned missing, int header_rank, const std::uint64_t* header_at,
                              const std::uint64_t* counts_at, bool& other) const {
    if ((missing & kHeaderBit) != 0) {
      return is_word_of(poll_word(call_, Awaited::kEntry, header_rank, number_, header_at), number_);
    }
    const int first = __ffs(static_cast<int>(missing)) - 1;
    const std::uint64_t* count_at = counts_at + first * kMaxExperts;
    if constexpr (Far::kPresent) {
      if (far_.is_far(first)) count_at = far_.count_number(first, static_cast<int>(threadIdx.x));
    }
    const WordOrOther found =
        await_unless_other(call_, LatencyKind::kDispatch, set_, {Awaited::kCounts, first, number_}, count_at);
    other = found.other;
    return found.payload.came;
  }

  /// Notes this lane's word of a rank's header.
  __device__ void note_header(int rank, std::uint32_t word) {
    constexpr int kWord = sizeof(std::uint32_t);
    constexpr int kTokens = offsetof(LatencyHeader, num_tokens) / kWord;
    constexpr int kBadEntry = offsetof(LatencyHeader, bad_entry) / kWord + 1;  // upper half: entries are not negative
    const int lane = lane_idx();
    const auto agreement = static_cast<std::uint32_t>(call_.agreement >> (lane == 0 ? 0 : 32));
    static_assert(offsetof(LatencyHeader, agreement) == 0);
    if (lane < 2 && (word != agreement || call_.agreement == 0)) atomicOr(&shared_.other_call, 1U);
    if (lane == kTokens) {
      memory_.shared->tokens[rank] = static_cast<std::int32_t>(word);
      if (reports()) call_.tables.tokens_of_rank[rank] = static_cast<std::int32_t>(word);
    }
    if (lane == kBadEntry && word >> 31 == 0) {
      atomicMin(&memory_.shared->first_bad_rank, static_cast<unsigned>(rank));
    }
  }

  /// Adds up the rows of this thread's expert: those before this block's source, and all.
  __device__ void add_up(const SmallCounts& counts) {
    const auto expert = static_cast<int>(threadIdx.x);
    const bool has_expert = expert < call_.num_experts;
    const std::int32_t home = has_expert ? memory_.experts.homes[expert] : -1;
    const bool here = has_expert && home_rank(home) == call_.ranks.rank;
    if (reports()) note_counts_of(counts, home, here);
    std::int32_t before = 0;
    std::int32_t rows = 0;
#pragma unroll
    for (int i = 0; i < kSmallRanks; ++i) {
      if (i == tokens_.source) before = rows;
      rows += static_cast<std::int32_t>(payload_of(counts.words[i]));  // 0 if there is no such rank
    }
    if (has_expert) memory_.experts.bases[expert] = before;
    if (here) memory_.experts.local_rows[home_expert(home)] = rows;
    if (has_expert && rows > call_.slab_capacity) {
      atomicMin(&memory_.shared->first_full_expert, static_cast<unsigned>(expert));
    }
    if constexpr (Far::kPresent) {
#pragma unroll
      for (int i = 0; i < kSmallRanks; ++i) {
        if (has_expert && i == tokens_.source) far_.note_count(expert, payload_of(counts.words[i]));
        // For the report of a full slab.
        if (has_expert && reports() && far_.is_far(i)) far_.import_count(i, expert, payload_of(counts.words[i]));
      }
    }
  }

  /// Writes tables that do not depend on counts. Threads of the block that reports.
  __device__ void note_offsets() const {
#pragma unroll 1
    for (auto local = static_cast<int>(threadIdx.x); local <= call_.num_local_experts; local += kDispatchThreads) {
      const std::int64_t offset = local * call_.slab_capacity;
      call_.tables.row_offsets[local] = offset;
      if (params_.host.result != nullptr) params_.host.row_offsets[local] = offset;
    }
  }

  /// Writes tables of this thread's expert in the block that reports, before it is known whether all ranks agree:
  /// readers of these tables check that first. All lanes.
  __device__ void note_counts_of(const SmallCounts& counts, std::int32_t home, bool here) {
    const int num_ranks = call_.ranks.num_ranks;
    const bool tells_host = params_.host.result != nullptr;
    std::int32_t* const ranges = call_.tables.source_ranges + home_expert(here ? home : 0) * num_ranks * 2;
    std::uint32_t own = 0;
    std::int32_t rows = 0;
#pragma unroll
    for (int i = 0; i < kSmallRanks; ++i) {
      if (i >= num_ranks) continue;
      const std::uint32_t count = payload_of(counts.words[i]);
      if (i == call_.ranks.rank) own = count;
      if (here) reinterpret_cast<int2*>(ranges)[i] = make_int2(static_cast<int>(count), rows);
      rows += static_cast<std::int32_t>(count);
      if (tells_host) add_to(memory_.shared->from_rank[i], here ? count : 0);
    }
    // Kernels behind this one may read it before the host hears that a slab is full.
    rows = min(rows, static_cast<std::int32_t>(call_.slab_capacity));
    if (here) call_.tables.rows_per_expert[home_expert(home)] = rows;
    if (!tells_host) return;
    if (here) params_.host.rows_per_expert[home_expert(home)] = rows;
#pragma unroll 1
    for (int i = 0; i < num_ranks; ++i) {
      add_to(memory_.shared->to_rank[i], home >= 0 && home_rank(home) == i ? own : 0);
    }
  }

  /// Adds the lanes' values to a sum of the block. All lanes.
  __device__ static void add_to(unsigned& sum, std::uint32_t value) {
    const std::uint32_t all = __reduce_add_sync(kAllLanes, value);
    if (lane_idx() == 0 && all != 0) atomicAdd(&sum, all);
  }

  /// Ends the call for this rank. Tells the host first, since its words take longest to arrive. All threads of the
  /// block that reports.
  __device__ void report(bool refused) {
    constexpr int kLeavingThread = 2 * kWarpLanes;
    const auto thread = static_cast<int>(threadIdx.x);
    if (!kHalf && thread == kLeavingThread) leave_whole_call(call_, LatencyKind::kDispatch, sent_call());
    if (refused) {
      const Outcome outcome = shared_.other_call != 0 ? Outcome::kSkip : Outcome::kGo;
      if (thread == 0) report_refused<false>(call_, params_, sent_call(), *memory_.shared, outcome);
      return;
    }
    const std::int64_t num_rows = call_.num_local_experts * call_.slab_capacity;
    if (thread == kWarpLanes) {
      std::int32_t most_tokens = 0;
#pragma unroll 1
      for (int rank = 0; rank < call_.ranks.num_ranks; ++rank) {
        most_tokens = max(most_tokens, memory_.shared->tokens[rank]);
      }
      *call_.tables.most_tokens = most_tokens;
      call_.tables.summary->num_used_rows = static_cast<std::int32_t>(num_rows);
      call_.tables.summary->valid = 1;
    }
    const RouteResultTables& host = params_.host;
    if (host.result == nullptr || warp_idx() != 0) return;
    if (thread < call_.ranks.num_ranks) {
      host.from_rank[thread] = memory_.shared->from_rank[thread];
      host.to_rank[thread] = is_absent(call_, thread) ? 0 : memory_.shared->to_rank[thread];
    }
    if (thread == 0) {
      host.result->num_used_rows = num_rows;
      host.result->repeats = 1;  // not used in latency mode
    }
    __syncwarp();
    if (thread != 0) return;
    fence_system();  // covers the stores of the other warps, which came before a barrier
    store_relaxed_system(&host.result->state, 1);
  }

  __device__ bool has_token() const {
    return tokens_.source < call_.ranks.num_ranks && tokens_.first < static_cast<int>(call_.max_tokens);
  }

  /// Receives this warp's row, or its share of one; false when the group broke. All lanes.
  __device__ bool receive_row(std::uint64_t seen) {
    const int lane = lane_idx();
    const int source = tokens_.source;
    const int token = tokens_.first;
    const SentCall sent = sent_call();
    const DispatchSlot slot = slot_of(call_, sent, source);
    const std::byte* const row = own_window(call_).rows(call_.layout, LatencyKind::kDispatch, set_) +
                                 source * call_.layout.source_bytes + token * params_.row.stride();
    const bool keeps = tokens_.share.part == 0;
    Payload entry{kNoExpert, true};
    if (lane < call_.num_topk) {
      entry = wait_payload(call_, {Awaited::kRow, source, number_}, entry_word(call_, sent, source, token), seen);
    }
    if (__all_sync(kAllLanes, static_cast<int>(entry.came)) == 0) return false;
    const Arrival arrival = find(entry.value);
    const std::uint64_t* const weight = keeps ? weight_word(call_, sent, arrival) : nullptr;
    const std::uint64_t seen_weight = weight != nullptr ? load_relaxed_system(weight) : 0;
    if (arrival.here != 0) {
      const Payload flag = wait_word(call_, {Awaited::kRow, source, number_}, slot.row_flags + token);
      if (__all_sync(kAllLanes, static_cast<int>(flag.came)) == 0) return false;
      copy(arrival, row);
    }
    return !keeps || keep_arrival(call_, sent, arrival, seen_weight);
  }

  /// The same of a row that comes from another node.
  __device__ bool receive_far_row() {
    const int source = tokens_.source;
    const int token = tokens_.first;
    typename Far::Record record;
    if (!far_.await_record(source, token, record_, record)) return false;
    const bool keeps = tokens_.share.part == 0;
    const Arrival arrival = find(record.entry);
    if (keeps && lane_idx() == 0) far_.keep_places(source, token, record.start);
    if (arrival.here != 0) {
      const std::int32_t num_tokens = memory_.shared->tokens[source];
      if (!far_.copy(arrival, record.start.row, num_tokens, tokens_.share)) return false;
    }
    return !keeps || keep_arrival(call_, sent_call(), arrival, make_word(number_, record.weight));
  }

  /// Finds the rows of this warp's token. `payload`: this lane's entry. All lanes.
  __device__ Arrival find(std::uint32_t payload) const {
    Arrival arrival;
    arrival.source = tokens_.source;
    arrival.token = tokens_.first;
    std::int32_t home = -1;
    if (payload != kNoExpert) {
      const int expert = entry_expert(payload);
      home = memory_.experts.homes[expert];
      const int at = memory_.experts.bases[expert] + entry_ordinal(payload);
      arrival.slot = home_expert(home) * static_cast<int>(call_.slab_capacity) + at;
      if (home_rank(home) == call_.ranks.rank) {
        arrival.expert = home_expert(home);
        arrival.row = at;
      }
    }
    // Entries of one expert share a row, which is stored once for each.
    arrival.here = __ballot_sync(kAllLanes, static_cast<int>(arrival.expert >= 0));
    const unsigned ranks = ranks_of(home);
    if (arrival.here != 0) {
      arrival.rank_ordinal = __popc(ranks & ((1U << call_.ranks.rank) - 1U));
    }
    return arrival;
  }

  /// Copies this warp's share of a row that has arrived to all its rows in the slab, mostly with all loads in flight at
  /// once.
  __device__ void copy(const Arrival& arrival, const std::byte* window_row) const {
    constexpr int kStep = kReceiveUnroll * kWarpLanes;
    const int lane = lane_idx();
    const auto* const from = reinterpret_cast<const uint4*>(window_row);
    const auto count = static_cast<int>(params_.row.x_bytes / static_cast<std::int64_t>(sizeof(uint4)));
    const SlabScales& scales = params_.scales;
    const std::byte* const scale_row = window_row + params_.row.scales_offset();
    const bool words = params_.row.scale_bytes == sizeof(std::uint32_t);
    // The last warps of a row take the first scales, since they have the least to copy.
    const int last_part = tokens_.share.parts - 1 - tokens_.share.part;
    int first = tokens_.share.part * kStep;
    int column = last_part * kWarpLanes + lane;
#pragma unroll 1
    while (first < count || column - lane < params_.row.num_scales) {
      uint4 values[kReceiveUnroll];
      std::uint32_t scale = 0;
#pragma unroll
      for (int i = 0; i < kReceiveUnroll; ++i) {
        const int at = first + i * kWarpLanes + lane;
        if (at < count) values[i] = from[at];
      }
      const bool has_scale = column < params_.row.num_scales;
      if (has_scale && words) scale = reinterpret_cast<const std::uint32_t*>(scale_row)[column];
      if (has_scale && !words) scale = static_cast<std::uint32_t>(scale_row[column]);
#pragma unroll 1
      for (unsigned left = arrival.here; left != 0; left &= left - 1) {
        const int from_lane = __ffs(static_cast<int>(left)) - 1;
        const std::int64_t slot = __shfl_sync(kAllLanes, arrival.slot, from_lane);
        const std::int64_t expert = __shfl_sync(kAllLanes, arrival.expert, from_lane);
        const std::int64_t row = __shfl_sync(kAllLanes, arrival.row, from_lane);
        auto* const to = reinterpret_cast<uint4*>(params_.x + slot * params_.x_stride);
#pragma unroll
        for (int i = 0; i < kReceiveUnroll; ++i) {
          const int at = first + i * kWarpLanes + lane;
          if (at < count) to[at] = values[i];
        }
        const std::int64_t at = expert * scales.expert_stride + row * scales.row_stride + column * scales.column_stride;
        if (has_scale && words) reinterpret_cast<std::uint32_t*>(scales.data)[at] = scale;
        if (has_scale && !words) scales.data[at] = static_cast<std::byte>(scale);
      }
      first += tokens_.share.parts * kStep;
      column += tokens_.share.parts * kWarpLanes;
    }
  }

  Far far_;
  LaneFarWords record_;  ///< of this warp's token, if it comes from a far rank
  FarKeeper keeper_;
  bool imported_ = false;
  int bad_source_ = -1;  ///< far rank with more rows than it may have
  const LatencyParams& call_;
  const DispatchReceiveRows& params_;
  SmallShared& shared_;
  const ReceiveMemory& memory_;
  const std::uint64_t number_;
  const int set_;
  const WarpTokens tokens_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SMALL_RECEIVE_CUH
