#ifndef FERRY_CUDA_LATENCY_WORDS_CUH
#define FERRY_CUDA_LATENCY_WORDS_CUH

/// How the halves of a call of latency mode tell each other things: see window.hpp for the words.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/params.hpp"
#include "cuda/sync/entry.cuh"

namespace ferry::cuda::device {

__device__ inline LatencyWindow window_of(const LatencyParams& call, int rank) {
  return LatencyWindow::at(call.ranks.peer_bases[rank], call.layout);
}

__device__ inline LatencyWindow own_window(const LatencyParams& call) { return window_of(call, call.ranks.rank); }

__device__ inline LatencyLocal& local_of(const LatencyParams& call) {
  return *reinterpret_cast<LatencyLocal*>(own_window(call).base + call.layout.control.local);
}

__device__ inline std::uint64_t make_word(std::uint64_t number, std::uint32_t payload) {
  return half_of(number) << 32 | payload;
}

__device__ inline bool is_word_of(std::uint64_t word, std::uint64_t number) { return word >> 32 == half_of(number); }

__device__ inline std::uint32_t payload_of(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

/// Sends one word. Rows that it announces need a fence_system before.
__device__ inline void post_word(std::uint64_t* address, std::uint64_t number, std::uint32_t payload) {
  store_relaxed_system(address, make_word(number, payload));
}

/// A thread's wait for something of a call, counted to its end where the program has asked what the call waits for.
class CallCount : public StepCount {
 public:
  __device__ CallCount(const LatencyParams& call, int rank) : StepCount(call.ranks, rank), call_(call), rank_(rank) {}

  __device__ void over(unsigned spin, std::uint64_t start_ns) const {
    if (call_.counts_waits && spin > 0) count_step(call_.ranks, rank_, start_ns, now_ns());
  }

 private:
  const LatencyParams& call_;
  int rank_;
};

/// Waits for a word of call `number`; 0 when the group broke. Not inlined: what waits is in no hurry, and the
/// instruction cache is for the others.
__device__ __noinline__ inline std::uint64_t poll_word(const LatencyParams& call, Awaited awaited, int peer,
                                                       std::uint64_t number, const std::uint64_t* address) {
  std::uint64_t word = 0;
  const auto read = [&word, address, number] {
    word = load_acquire_system(address);
    return is_word_of(word, number) ? number : 0;
  };
  return wait_until(call.ranks, {awaited, peer, number}, read, number, CallCount(call, peer)) ? word : 0;
}

/// The payload of a word, and whether it came: not when the group broke.
struct Payload {
  std::uint32_t value = 0;
  bool came = false;
};

/// One thread's wait for a word of a call that says everything itself, of which `seen` is what a look found.
__device__ inline Payload wait_payload(const LatencyParams& call, const Wait& wait, const std::uint64_t* address,
                                       std::uint64_t seen) {
  if (!is_word_of(seen, wait.epoch)) [[unlikely]] {  // or else the code that waits lies in between
    seen = poll_word(call, wait.awaited, wait.peer, wait.epoch, address);
    if (!is_word_of(seen, wait.epoch)) return {};
  }
  return {payload_of(seen), true};
}

__device__ inline Payload wait_payload(const LatencyParams& call, const Wait& wait, const std::uint64_t* address) {
  return wait_payload(call, wait, address, load_relaxed_system(address));
}

/// The same for a word before which its sender wrote something else, which is visible then.
__device__ inline Payload wait_word(const LatencyParams& call, const Wait& wait, const std::uint64_t* address) {
  return wait_payload(call, wait, address, load_acquire_system(address));
}

__device__ inline std::uint64_t* header_words(const LatencyParams& call, int at_rank, LatencyKind kind, int set,
                                              int source) {
  const int index = (static_cast<int>(kind) * kHeaderSets + set) * call.ranks.num_ranks + source;
  return window_of(call, at_rank).words(call.layout.control.headers) + index * kLatencyHeaderSlotWords;
}

__device__ inline std::uint64_t* grant_word(const LatencyParams& call, int at_rank, LatencyKind kind, int receiver,
                                            std::uint64_t number) {
  const int index = static_cast<int>(kind) * call.ranks.num_ranks + receiver;
  return window_of(call, at_rank).words(call.layout.control.grants) + index * kGrantSlots +
         static_cast<int>(number % kGrantSlots);
}

/// What a wait found that ends where the peer makes another call.
struct WordOrOther {
  Payload payload;
  bool other = false;  ///< it does, and there is no word
};

/// One thread's wait for a word of a peer's in this rank's `set`, which the peer may never send since it makes another
/// call, as its header says. Not inlined, as poll_word.
__device__ __noinline__ inline WordOrOther await_unless_other(const LatencyParams& call, LatencyKind kind, int set,
                                                              Wait wait, const std::uint64_t* address) {
  constexpr std::size_t kAgreementWord = offsetof(LatencyHeader, agreement) / sizeof(std::uint32_t);
  const std::uint64_t* const agreement = header_words(call, call.ranks.rank, kind, set, wait.peer) + kAgreementWord;
  std::uint64_t word = 0;
  const auto read = [&word, address, agreement, &wait, &call] {
    word = load_acquire_system(address);
    if (is_word_of(word, wait.epoch)) return wait.epoch;
    const std::uint64_t low = load_acquire_system(agreement);
    const std::uint64_t high = load_acquire_system(agreement + 1);
    if (!is_word_of(low, wait.epoch) || !is_word_of(high, wait.epoch)) return std::uint64_t{0};
    const std::uint64_t theirs = half_of(high) << 32 | half_of(low);
    return theirs == call.agreement ? 0 : wait.epoch;
  };
  const CallCount count(call, wait.peer);
  const bool came = wait_until(call.ranks, wait, read, wait.epoch, count);
  return {{payload_of(word), came}, came && !is_word_of(word, wait.epoch)};
}

/// Words of one source: dispatch's counts, and combine's done.
__device__ inline std::uint64_t* count_words(const LatencyParams& call, int at_rank, int set, int source) {
  constexpr auto kStride = static_cast<int>(kMaxExperts);
  return window_of(call, at_rank).words(call.layout.control.counts) + (set * call.ranks.num_ranks + source) * kStride;
}

__device__ inline std::uint64_t* done_words(const LatencyParams& call, int at_rank, int set, int source) {
  return window_of(call, at_rank).words(call.layout.control.done) +
         (set * call.ranks.num_ranks + source) * kMaxCallBlocks;
}

/// The number of the call that this kernel makes: all blocks read it before the last of them ends the turn.
__device__ inline std::uint64_t turn_number(const LatencyParams& call, LatencyKind kind) {
  return static_cast<volatile LatencyLocal&>(local_of(call)).sent[static_cast<int>(kind)] + 1;
}

/// The next kernel of this kind makes the next call.
__device__ inline void count_turn(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  LatencyLocal& local = local_of(call);
  local.arrivals[static_cast<int>(kind)] = 0;
  local.sent[static_cast<int>(kind)] = number;
}

/// Ends the turn of a kernel that is a send half. One thread of each block, once it has used the number.
__device__ inline void end_turn(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  const std::uint32_t before = atomicAdd(&local_of(call).arrivals[static_cast<int>(kind)], 1U);
  if (before + 1 == gridDim.x) count_turn(call, kind, number);
}

/// Words say half of a number, so none may be met again 2^32 calls later. Each set is cleared once in as many calls as
/// an era has, by whoever has just received a call in it: its words become words of that call, which nobody reads any
/// more, and a word of it that is still on its way changes nothing. A set rests for a few calls at most.
__device__ inline std::uint64_t era_of(std::uint64_t number) { return number >> 30; }
__device__ __noinline__ inline void clear_words(const LatencyParams& call, LatencyKind kind, int set,
                                                std::uint64_t number) {
  const std::int64_t num_ranks = call.ranks.num_ranks;
  const bool combines = kind == LatencyKind::kCombine;
  // One copy of the loop: nearly no call runs it.
#pragma unroll 1
  for (int part = 0; part < (combines ? 3 : 2); ++part) {
    std::uint64_t* words = own_window(call).slot(call.layout, kind, set, 0);
    std::int64_t count = call.layout.words_bytes / LatencyLayout::kWordBytes;
    if (part == 1) {
      words = combines ? done_words(call, call.ranks.rank, set, 0) : count_words(call, call.ranks.rank, set, 0);
      count = num_ranks * (combines ? kMaxCallBlocks : static_cast<int>(kMaxExperts));
    } else if (part == 2) {
      words = reinterpret_cast<std::uint64_t*>(own_window(call).row_words(call.layout, call.ranks.num_ranks, set, 0));
      count = num_ranks * call.layout.row_words_bytes / LatencyLayout::kWordBytes;
    }
#pragma unroll 1
    for (std::int64_t i = lane_idx(); i < count; i += kWarpLanes) words[i] = make_word(number, 0);
  }
  if (lane_idx() == 0) local_of(call).cleared[static_cast<int>(kind)][set] = era_of(number);
}

/// Clears a set if it is time. All lanes of one warp.
__device__ inline void clear_words_in_time(const LatencyParams& call, LatencyKind kind, int set, std::uint64_t number) {
  const volatile LatencyLocal& local = local_of(call);
  const bool cleared = local.cleared[static_cast<int>(kind)][set] == era_of(number);
  if (__all_sync(kAllLanes, static_cast<int>(cleared)) == 0) clear_words(call, kind, set, number);
}

/// Tells every rank where this one receives call `number`. All lanes of one warp.
__device__ inline void post_grant(const LatencyParams& call, LatencyKind kind, std::uint64_t number, int set) {
#pragma unroll 1
  for (int rank = lane_idx(); rank < call.ranks.num_ranks; rank += kWarpLanes) {
    post_word(grant_word(call, rank, kind, call.ranks.rank, number), number, static_cast<std::uint32_t>(set));
  }
}

/// Gives a set in which call `number` was received to the next call that has none yet. Everything that was read of it
/// must have been read before, and nobody may still store to where another rank's stores of a later call go. All lanes
/// of one warp.
__device__ inline void grant_set(const LatencyParams& call, LatencyKind kind, std::uint64_t number, int set) {
  clear_words_in_time(call, kind, set, number);
  std::uint64_t granted = 0;
  if (lane_idx() == 0) {
    auto* counter = reinterpret_cast<unsigned long long*>(&local_of(call).granted[static_cast<int>(kind)]);
    granted = atomicAdd(counter, 1ULL) + 1;
  }
  granted = __shfl_sync(kAllLanes, granted, 0);
  fence_system();
  post_grant(call, kind, granted, set);
}

/// Grants the set of the call before `number`, if a kernel has made all of that, and nobody has granted it since. All
/// lanes of one warp.
__device__ __noinline__ inline void grant_owed_set(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  std::uint32_t set = 0;
  if (lane_idx() == 0) set = atomicExch(&local_of(call).owed[static_cast<int>(kind)], 0U);
  set = __shfl_sync(kAllLanes, set, 0);
  if (set != 0) grant_set(call, kind, number - 1, static_cast<int>(set) - 1);
}

/// What a warp has seen of the grants of the first ranks, in all slots, before it knew the number of its call: so that
/// it waits for memory once, not twice.
struct GrantsLook {
  static constexpr int kRanks = kWarpLanes / kGrantSlots;
  std::uint64_t word = 0;

  __device__ GrantsLook(const LatencyParams& call, LatencyKind kind) {
    const int rank = lane_idx() / kGrantSlots;
    const auto slot = static_cast<std::uint64_t>(lane_idx() % kGrantSlots);
    if (rank < call.ranks.num_ranks) {
      word = load_acquire_system(grant_word(call, call.ranks.rank, kind, rank, slot));
    }
  }
  /// Lane i gets the word of rank i. All lanes.
  __device__ std::uint64_t of(std::uint64_t number) const {
    const int lane = lane_idx() % kRanks * kGrantSlots + static_cast<int>(number % kGrantSlots);
    return __shfl_sync(kAllLanes, word, lane);
  }
};

/// What else a warp reads before its call's turn. Before GrantsLook, which is waited for where it is made.
struct TurnLook {
  std::uint64_t number = 0;   ///< of the call
  std::uint64_t granted = 0;  ///< the last number that this rank had granted a set to
  bool broken = false;        ///< the group; a kernel behind one in which it broke finds the number of that one

  __device__ TurnLook(const LatencyParams& call, LatencyKind kind)
      : number(turn_number(call, kind)),
        granted(static_cast<volatile LatencyLocal&>(local_of(call)).granted[static_cast<int>(kind)]),
        broken(is_broken(call.ranks)) {}
};

/// Waits for the sets in which the ranks receive this call: `sets` [R] in shared memory. All lanes of one warp; false
/// in all of them when the group broke. A rank with kNoSet gets a header and nothing else.
__device__ inline bool wait_grants(const LatencyParams& call, LatencyKind kind, const TurnLook& turn,
                                   const GrantsLook& look, int* sets) {
  bool all = !turn.broken;
  std::uint64_t seen = look.of(turn.number);
#pragma unroll 1
  for (int rank = lane_idx(); rank < call.ranks.num_ranks; rank += kWarpLanes) {
    const std::uint64_t* const word = grant_word(call, call.ranks.rank, kind, rank, turn.number);
    if (rank >= GrantsLook::kRanks) seen = load_acquire_system(word);
    const Payload set = wait_payload(call, {Awaited::kDone, rank, turn.number}, word, seen);
    all = all && set.came;
    sets[rank] = static_cast<int>(set.value);
  }
  const bool every = __all_sync(kAllLanes, static_cast<int>(all)) != 0;
  __syncwarp();
  return every;
}

/// How a kernel that sends begins: the number of its call, or 0 when the group broke. All lanes of one warp of each
/// block, with what they have looked at.
__device__ inline std::uint64_t wait_for_turn(const LatencyParams& call, LatencyKind kind, const TurnLook& turn,
                                              const GrantsLook& look, int* sets) {
  // This call may be the one to get the set that is owed: where others are in flight.
  const bool urgent = turn.granted < turn.number;
  if (blockIdx.x == 0 && __any_sync(kAllLanes, static_cast<int>(urgent)) != 0) {
    grant_owed_set(call, kind, turn.number);
  }
  return wait_grants(call, kind, turn, look, sets) ? turn.number : 0;
}

/// The same. `meanwhile` is called when the first loads are there.
template <typename Meanwhile>
__device__ inline std::uint64_t wait_for_turn(const LatencyParams& call, LatencyKind kind, int* sets,
                                              Meanwhile meanwhile) {
  const TurnLook turn(call, kind);
  const GrantsLook look(call, kind);
  meanwhile();
  return wait_for_turn(call, kind, turn, look, sets);
}

/// Sends every rank this rank's header. All lanes of one warp of one block; `sets` [R].
__device__ inline void post_header(const LatencyParams& call, LatencyKind kind, std::uint64_t number,
                                   const LatencyHeader& header, const int* sets) {
  const int lane = lane_idx();
  if (lane >= kLatencyHeaderWords) return;
  const std::uint32_t payload = reinterpret_cast<const std::uint32_t*>(&header)[lane];
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    post_word(header_words(call, rank, kind, sets[rank], call.ranks.rank) + lane, number, payload);
  }
}

/// A rank's header, as one warp holds it: lane i has word i.
class ReceivedHeader {
 public:
  __device__ explicit ReceivedHeader(std::uint32_t word) : word_(word) {}

  __device__ std::uint64_t agreement() const { return field(offsetof(LatencyHeader, agreement)); }
  __device__ std::int64_t record_number() const { return signed_field(offsetof(LatencyHeader, record_number)); }
  __device__ std::int64_t num_tokens() const { return signed_field(offsetof(LatencyHeader, num_tokens)); }
  __device__ std::int64_t num_blocks() const { return signed_field(offsetof(LatencyHeader, blocks_or_homes)); }
  __device__ std::int64_t bad_entry() const { return signed_field(offsetof(LatencyHeader, bad_entry)); }
  __device__ std::uint64_t homes_hash() const { return field(offsetof(LatencyHeader, blocks_or_homes)); }
  __device__ std::int64_t bad_id() const { return signed_field(offsetof(LatencyHeader, bad_id)); }

 private:
  __device__ std::uint64_t field(std::size_t offset_bytes) const {
    const int word = static_cast<int>(offset_bytes / sizeof(word_));
    const std::uint64_t low = __shfl_sync(kAllLanes, word_, word);
    return static_cast<std::uint64_t>(__shfl_sync(kAllLanes, word_, word + 1)) << 32 | low;
  }
  __device__ std::int64_t signed_field(std::size_t offset_bytes) const {
    return static_cast<std::int64_t>(field(offset_bytes));
  }

  std::uint32_t word_;
};

/// The first rank whose header this warp looks at, and this lane's word of a header. Lanes without one of their own
/// read the first one once more.
__device__ inline int first_header_rank() { return static_cast<int>(blockDim.x) / kWarpLanes - 1 - warp_idx(); }
__device__ inline const std::uint64_t* header_word(const LatencyParams& call, LatencyKind kind, int set, int rank) {
  const int word = lane_idx() < kLatencyHeaderWords ? lane_idx() : 0;
  return header_words(call, call.ranks.rank, kind, set, rank) + word;
}
/// Null where this warp looks at none.
__device__ inline const std::uint64_t* first_header_word(const LatencyParams& call, LatencyKind kind, int set) {
  const int rank = first_header_rank();
  return rank < call.ranks.num_ranks ? header_word(call, kind, set, rank) : nullptr;
}

/// Waits for the headers of all ranks in this rank's `set`, and compares them; calls `take(rank, header)` in a whole
/// warp for each, also of calls that are then refused. All threads of a block; all of them, on every rank, get the same
/// outcome, and what `take` wrote to shared memory. The last warps do it: the first may have something to finish.
/// `look`: at first_header_word(), or null.
template <typename Take>
__device__ inline Outcome await_headers(const LatencyParams& call, LatencyKind kind, int set, std::uint64_t number,
                                        Take take, const std::uint64_t* look = nullptr) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  bool here = true;
  bool equal = true;
#pragma unroll 1
  for (int rank = first_header_rank(); rank < call.ranks.num_ranks; rank += num_warps) {
    const Wait wait{Awaited::kEntry, rank, number};
    const std::uint64_t* const word = header_word(call, kind, set, rank);
    const Payload payload = wait_payload(call, wait, word, look != nullptr ? *look : load_relaxed_system(word));
    look = nullptr;
    const bool all_came = __all_sync(kAllLanes, static_cast<int>(payload.came)) != 0;
    __syncwarp();  // hands what each lane has acquired to all of them
    here = here && all_came;
    if (!all_came) continue;
    const ReceivedHeader received(payload.value);
    equal = equal && received.agreement() == call.agreement && call.agreement != 0;
    take(rank, received);
  }
  const bool all_here = __syncthreads_and(static_cast<int>(here)) != 0;
  const bool all_equal = __syncthreads_and(static_cast<int>(equal)) != 0;
  return !all_here ? Outcome::kStop : all_equal ? Outcome::kGo : Outcome::kSkip;
}

/// Reports to the host that ranks disagree, or that one refused. One thread of the call, after await_headers.
__device__ __noinline__ inline void report_latency_disagreement(const LatencyParams& call, LatencyKind kind, int set) {
  FaultReport& fault = call.ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;  // the first one counts
  fault.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  fault.rank = -1;
  constexpr std::size_t kWord = offsetof(LatencyHeader, record_number) / sizeof(std::uint32_t);
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    const std::uint64_t* words = header_words(call, call.ranks.rank, kind, set, rank) + kWord;
    const std::uint64_t low = payload_of(load_acquire_system(words));
    const std::uint64_t high = payload_of(load_acquire_system(words + 1));
    fault.record_numbers[rank] = static_cast<std::int64_t>(high << 32 | low);
  }
  fence_system();
  store_release_system(&fault.state, 1);
}

/// Reports, perhaps once more, why a dispatch of latency mode was refused. One thread of the call.
__device__ __noinline__ inline void report_refused_dispatch(const RankParams& ranks, const RouteSummary& summary) {
  FaultReport& fault = ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) == 0) fault.latency = 1;  // else the first one counts
  report_refused_route(ranks, summary);
}

/// Whether this is the last block to count up `arrivals`; its threads then see what all blocks have done. All threads
/// of each block call it once.
__device__ inline bool is_last_block(std::uint32_t& arrivals) {
  __syncthreads();
  std::uint32_t before = 0;
  if (threadIdx.x == 0) before = add_acq_rel_device(&arrivals, 1);
  const bool last = __syncthreads_or(static_cast<int>(threadIdx.x == 0 && before + 1 == gridDim.x)) != 0;
  return last;
}

/// A block of a kernel that makes a whole call knows the call's number, and has granted the set that was owed, if it is
/// the one to do that. One thread of each block but the first, mostly before its warp stores to peers: the release
/// waits until what it has stored is there.
__device__ inline void enter_whole_call(const LatencyParams& call, LatencyKind kind) {
  add_release_device(&local_of(call).arrivals[static_cast<int>(kind)], 1U);
}

/// Ends the turn of such a kernel, and leaves its set to the next one: only then have all blocks read all of it, and
/// they need not be waited for. One thread of the first block.
__device__ inline void leave_whole_call(const LatencyParams& call, LatencyKind kind, const SentCall& sent) {
  const std::uint32_t* const arrivals = &local_of(call).arrivals[static_cast<int>(kind)];
  const auto read = [arrivals] { return static_cast<std::uint64_t>(load_acquire_device(arrivals)); };
  if (!wait_until(call.ranks, {Awaited::kOwn, call.ranks.rank, sent.number}, read, gridDim.x - 1)) return;
  count_turn(call, kind, sent.number);
  local_of(call).owed[static_cast<int>(kind)] = sent.set + 1;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_WORDS_CUH
