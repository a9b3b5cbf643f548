#ifndef FERRY_CUDA_LATENCY_TURNS_CUH
#define FERRY_CUDA_LATENCY_TURNS_CUH

/// Turns of the calls of latency mode: how a kernel gets the number of its call and the sets that ranks grant for it,
/// ends the call, and grants its own set again (window.hpp).

#include <cstdint>

#include "cuda/latency/words.cuh"

namespace ferry::cuda::device {

/// Number of the call that this kernel makes. All blocks read it before the last of them ends the turn.
__device__ inline std::uint64_t turn_number(const LatencyParams& call, LatencyKind kind) {
  return static_cast<volatile LatencyLocal&>(local_of(call)).sent[static_cast<int>(kind)] + 1;
}

/// Makes the next kernel of this kind make the next call.
__device__ inline void count_turn(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  LatencyLocal& local = local_of(call);
  local.arrivals[static_cast<int>(kind)] = 0;
  local.sent[static_cast<int>(kind)] = number;
}

/// Ends the turn of a kernel that makes a send half. One thread of each block, after its last use of the number.
__device__ inline void end_turn(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  const std::uint32_t before = atomicAdd(&local_of(call).arrivals[static_cast<int>(kind)], 1U);
  if (before + 1 == gridDim.x) count_turn(call, kind, number);
}

/// Words carry half of a number, so a word must not survive until the same half returns 2^32 calls later. Each set is
/// therefore cleared once per era, by a warp that has just received a call in it: its words become words of that call,
/// which no thread reads any more, and a late word of that call changes nothing. A set stays unused for a few calls at
/// most.
FERRY_HOST_DEVICE constexpr std::uint64_t era_of(std::uint64_t number) { return number >> 30; }
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

/// Clears a set once per era. All lanes of one warp.
__device__ inline void clear_words_in_time(const LatencyParams& call, LatencyKind kind, int set, std::uint64_t number) {
  const volatile LatencyLocal& local = local_of(call);
  const bool cleared = local.cleared[static_cast<int>(kind)][set] == era_of(number);
  if (__all_sync(kAllLanes, static_cast<int>(cleared)) == 0) clear_words(call, kind, set, number);
}

/// Tells every rank in which set this one receives call `number`. All lanes of one warp.
__device__ inline void post_grant(const LatencyParams& call, LatencyKind kind, std::uint64_t number, int set) {
#pragma unroll 1
  for (int rank = lane_idx(); rank < call.ranks.num_ranks; rank += kWarpLanes) {
    post_word(grant_word(call, rank, kind, call.ranks.rank, number), number, static_cast<std::uint32_t>(set));
  }
}

/// Grants the set in which call `number` was received to the next call without a set, whose number it returns. All
/// reads of the set must be over, and no rank may still store to places that another rank writes in a later call. All
/// lanes of one warp.
__device__ inline std::uint64_t grant_set(const LatencyParams& call, LatencyKind kind, std::uint64_t number, int set) {
  clear_words_in_time(call, kind, set, number);
  std::uint64_t granted = 0;
  if (lane_idx() == 0) {
    auto* counter = reinterpret_cast<unsigned long long*>(&local_of(call).granted[static_cast<int>(kind)]);
    granted = atomicAdd(counter, 1ULL) + 1;
  }
  granted = __shfl_sync(kAllLanes, granted, 0);
  fence_system();
  post_grant(call, kind, granted, set);
  return granted;
}

/// Grants the *owed set*: that of the last call that was received, if no kernel has granted the set since. All lanes of
/// one warp.
__device__ __noinline__ inline void grant_owed_set(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  std::uint32_t set = 0;
  if (lane_idx() == 0) set = atomicExch(&local_of(call).owed[static_cast<int>(kind)], 0U);
  set = __shfl_sync(kAllLanes, set, 0);
  if (set != 0) grant_set(call, kind, number - 1, static_cast<int>(set) - 1);
}

/// Set of call `number`, which this rank refuses: the set that it has granted, or else kNoSet, which it grants now. All
/// lanes of one warp.
__device__ inline int own_set(const LatencyParams& call, LatencyKind kind, std::uint64_t number) {
  std::uint64_t& granted = local_of(call).granted[static_cast<int>(kind)];
  const bool has_set = static_cast<volatile std::uint64_t&>(granted) >= number;
  __syncwarp();  // all lanes have read it
  if (!has_set) {
    if (lane_idx() == 0) granted = number;
    post_grant(call, kind, number, kNoSet);
    return kNoSet;
  }
  return static_cast<int>(
      payload_of(load_relaxed_system(grant_word(call, call.ranks.rank, kind, call.ranks.rank, number))));
}

/// Grants of the first ranks, in all slots, loaded before the number of the call is known: one trip to memory instead
/// of two.
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

/// Other values that a warp reads before its call's turn. To be made before GrantsLook, whose loads are waited for at
/// once.
struct TurnLook {
  std::uint64_t number = 0;   ///< number of the call
  std::uint64_t granted = 0;  ///< last number that this rank had granted a set to
  bool broken = false;        ///< the group broke; kernels after the one in which it broke get that kernel's number

  __device__ TurnLook(const LatencyParams& call, LatencyKind kind)
      : number(turn_number(call, kind)),
        granted(static_cast<volatile LatencyLocal&>(local_of(call)).granted[static_cast<int>(kind)]),
        broken(is_broken(call.ranks)) {}
};

/// Waits for the sets in which the ranks receive this call: `sets` [R] in shared memory. All lanes of one warp; false
/// in all of them when the group broke. A rank with kNoSet gets a header and nothing else. `far`: if present, ranks of
/// other nodes have kNoSet.
__device__ inline bool wait_grants(const LatencyParams& call, LatencyKind kind, const TurnLook& turn,
                                   const GrantsLook& look, int* sets, const FarLayout* far = nullptr) {
  bool all = !turn.broken;
  std::uint64_t seen = look.of(turn.number);
#pragma unroll 1
  for (int rank = lane_idx(); rank < call.ranks.num_ranks; rank += kWarpLanes) {
    const std::uint64_t* const word = grant_word(call, call.ranks.rank, kind, rank, turn.number);
    if (far != nullptr && far->is_far(rank)) {
      sets[rank] = kNoSet;
      continue;
    }
    if (rank >= GrantsLook::kRanks) seen = load_acquire_system(word);
    const Payload set = wait_payload(call, {Awaited::kDone, rank, turn.number}, word, seen);
    all = all && set.came;
    sets[rank] = static_cast<int>(set.value);
  }
  const bool every = __all_sync(kAllLanes, static_cast<int>(all)) != 0;
  __syncwarp();
  return every;
}

/// Waits for the call's turn, as the first step of a kernel that sends. Returns the call's number, or 0 when the group
/// broke; `sets` as in wait_grants(). All lanes of one warp of each block. `meanwhile` runs between the first loads and
/// their use. `kGrantsOwed`: the first block grants the owed set if this call may be the one to get it; otherwise
/// another warp of the kernel grants it. `far`: see wait_grants().
template <bool kGrantsOwed, typename Meanwhile>
__device__ inline std::uint64_t wait_for_turn(const LatencyParams& call, LatencyKind kind, int* sets,
                                              Meanwhile meanwhile, const FarLayout* far = nullptr) {
  const TurnLook turn(call, kind);
  const GrantsLook look(call, kind);
  meanwhile();
  if constexpr (kGrantsOwed) {
    const bool urgent = turn.granted < turn.number;  // only while other calls are in flight
    if (blockIdx.x == 0 && __any_sync(kAllLanes, static_cast<int>(urgent)) != 0) {
      grant_owed_set(call, kind, turn.number);
    }
  }
  return wait_grants(call, kind, turn, look, sets, far) ? turn.number : 0;
}

/// Whether this block is the last to increment `arrivals`; its threads then see the stores of all blocks. All threads
/// of each block call it once.
__device__ inline bool is_last_block(std::uint32_t& arrivals) {
  __syncthreads();
  std::uint32_t before = 0;
  if (threadIdx.x == 0) before = add_acq_rel_device(&arrivals, 1);
  const bool last = __syncthreads_or(static_cast<int>(threadIdx.x == 0 && before + 1 == gridDim.x)) != 0;
  return last;
}

/// Signals that this block of a whole call has read the call's number, and has granted the owed set if that was its
/// task. One thread of each block but the first, usually before its warp stores to peers: the release waits for the
/// thread's earlier stores.
__device__ inline void enter_whole_call(const LatencyParams& call, LatencyKind kind) {
  add_release_device(&local_of(call).arrivals[static_cast<int>(kind)], 1U);
}

/// Ends the turn of a kernel that makes a whole call, and leaves its set to the next kernel: all blocks have read all
/// of it only then, and no block needs to wait for them. One thread of the first block.
__device__ inline void leave_whole_call(const LatencyParams& call, LatencyKind kind, const SentCall& sent) {
  const std::uint32_t* const arrivals = &local_of(call).arrivals[static_cast<int>(kind)];
  const auto read = [arrivals] { return static_cast<std::uint64_t>(load_acquire_device(arrivals)); };
  if (!wait_until(call.ranks, {Awaited::kOwn, call.ranks.rank, sent.number}, read, gridDim.x - 1)) return;
  count_turn(call, kind, sent.number);
  local_of(call).owed[static_cast<int>(kind)] = sent.set + 1;
}

/// Signals that this block of a receive half has read `words`. One thread of each block but the first, behind a barrier
/// that follows the reads of all its threads.
__device__ inline void enter_receive_half(SentCall& words) { add_release_device(&words.arrivals, 1U); }

/// Ends a receive half, and leaves its set to the next kernel of its kind, as leave_whole_call() does. Grants the set
/// that another receive half has left since, if there is one; returns whether it did. All lanes of one warp of the
/// first block.
__device__ inline bool leave_receive_half(const LatencyParams& call, LatencyKind kind, SentCall& words,
                                          const SentCall& sent) {
  std::uint32_t left = 0;
  if (lane_idx() == 0) {
    const std::uint32_t* const arrivals = &words.arrivals;
    const auto read = [arrivals] { return static_cast<std::uint64_t>(load_acquire_device(arrivals)); };
    if (wait_until(call.ranks, {Awaited::kOwn, call.ranks.rank, sent.number}, read, gridDim.x - 1)) {
      words.pending = 0;
      words.arrivals = 0;
      left = atomicExch(&local_of(call).owed[static_cast<int>(kind)], sent.set + 1);
    }
  }
  left = __shfl_sync(kAllLanes, left, 0);
  if (left == 0) return false;
  grant_set(call, kind, sent.number, static_cast<int>(left) - 1);
  __syncwarp();
  return true;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_TURNS_CUH
