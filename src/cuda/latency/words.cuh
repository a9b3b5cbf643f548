#ifndef FERRY_CUDA_LATENCY_WORDS_CUH
#define FERRY_CUDA_LATENCY_WORDS_CUH

/// Words between the halves of a call of latency mode: their addresses, how they are posted and how they are waited for
/// (window.hpp).

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

/// Sends one word. A word that announces rows needs a fence_system before it.
__device__ inline void post_word(std::uint64_t* address, std::uint64_t number, std::uint32_t payload) {
  store_relaxed_system(address, make_word(number, payload));
}

/// Counts a thread's wait for a word of a call: to its end if the program has asked what the call waits for.
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

/// Polls of a word before the slow wait begins, which has a deadline, checks and counts: its threads all read the same
/// lines. They take some microseconds, by which the deadline starts later.
inline constexpr int kWordLooks = 64;

/// Waits for a word of call `number`; 0 when the group broke. Not inlined: a waiting thread is in no hurry, and the
/// instruction cache is for the other threads.
__device__ __noinline__ inline std::uint64_t poll_word(const LatencyParams& call, Awaited awaited, int peer,
                                                       std::uint64_t number, const std::uint64_t* address) {
  std::uint64_t word = 0;
  const auto read = [&word, address, number] {
    word = load_acquire_system(address);
    return is_word_of(word, number) ? number : 0;
  };
  const int most_looks = call.counts_waits ? 0 : kWordLooks;  // looks are not counted
#pragma unroll 1
  for (int looks = 0; looks < most_looks; ++looks) {
    if (read() != 0) return word;
  }
  return wait_until(call.ranks, {awaited, peer, number}, read, number, CallCount(call, peer)) ? word : 0;
}

/// Payload of a word, and whether it came: not when the group broke.
struct Payload {
  std::uint32_t value = 0;
  bool came = false;
};

/// One thread's wait for a word of a call that publishes nothing but itself. `seen`: the word as loaded before.
__device__ inline Payload wait_payload(const LatencyParams& call, const Wait& wait, const std::uint64_t* address,
                                       std::uint64_t seen) {
  if (!is_word_of(seen, wait.epoch)) [[unlikely]] {  // keeps the waiting code out of the straight path
    seen = poll_word(call, wait.awaited, wait.peer, wait.epoch, address);
    if (!is_word_of(seen, wait.epoch)) return {};
  }
  return {payload_of(seen), true};
}

__device__ inline Payload wait_payload(const LatencyParams& call, const Wait& wait, const std::uint64_t* address) {
  return wait_payload(call, wait, address, load_relaxed_system(address));
}

/// wait_payload() for a word that publishes earlier stores of its sender.
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

/// Looks for a word of call `number` that publishes nothing but itself; returns what it has seen last. Looks once if
/// waits are counted, since these looks are not.
__device__ inline std::uint64_t look_for_word(const LatencyParams& call, std::uint64_t number,
                                              const std::uint64_t* address) {
  const int most_looks = call.counts_waits ? 1 : kWordLooks;
  std::uint64_t seen = load_relaxed_system(address);
#pragma unroll 1
  for (int looks = 1; looks < most_looks && !is_word_of(seen, number); ++looks) seen = load_relaxed_system(address);
  return seen;
}

/// Result of a wait that also ends if the peer makes another call.
struct WordOrOther {
  Payload payload;
  bool other = false;  ///< the peer makes another call, and sends no word
};

/// Polls of a word for each look at its peer's header: the threads of all blocks read the same header, and the
/// second-level cache serves a single line slowly.
inline constexpr unsigned kPollsPerHeader = 16;

/// One thread's wait for a word from a peer in this rank's `set`. Also ends if the peer's header shows that it makes
/// another call, since it may never send the word then. Not inlined, like poll_word.
__device__ __noinline__ inline WordOrOther await_unless_other(const LatencyParams& call, LatencyKind kind, int set,
                                                              Wait wait, const std::uint64_t* address) {
  constexpr std::size_t kAgreementWord = offsetof(LatencyHeader, agreement) / sizeof(std::uint32_t);
  const std::uint64_t* const agreement = header_words(call, call.ranks.rank, kind, set, wait.peer) + kAgreementWord;
  std::uint64_t word = 0;
  unsigned polls = 0;
  const auto read = [&word, &polls, address, agreement, &wait, &call] {
    word = load_acquire_system(address);
    if (is_word_of(word, wait.epoch)) return wait.epoch;
    if (++polls % kPollsPerHeader != 0) return std::uint64_t{0};
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

/// Words of one source: counts of a dispatch, done words of a combine.
__device__ inline std::uint64_t* count_words(const LatencyParams& call, int at_rank, int set, int source) {
  constexpr auto kStride = static_cast<int>(kMaxExperts);
  return window_of(call, at_rank).words(call.layout.control.counts) + (set * call.ranks.num_ranks + source) * kStride;
}

__device__ inline std::uint64_t* done_words(const LatencyParams& call, int at_rank, int set, int source) {
  return window_of(call, at_rank).words(call.layout.control.done) +
         (set * call.ranks.num_ranks + source) * kMaxCallBlocks;
}

/// Sends this rank's header to every rank. All lanes of one warp of one block; `sets` [R].
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

/// A rank's header in one warp: lane i holds word i.
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

/// First rank whose header this warp polls, and this lane's word of a header. Lanes without a word of their own read
/// the first word once more.
__device__ inline int first_header_rank() { return static_cast<int>(blockDim.x) / kWarpLanes - 1 - warp_idx(); }
__device__ inline const std::uint64_t* header_word(const LatencyParams& call, LatencyKind kind, int set, int rank) {
  const int word = lane_idx() < kLatencyHeaderWords ? lane_idx() : 0;
  return header_words(call, call.ranks.rank, kind, set, rank) + word;
}
/// Null if this warp polls no header.
__device__ inline const std::uint64_t* first_header_word(const LatencyParams& call, LatencyKind kind, int set) {
  const int rank = first_header_rank();
  return rank < call.ranks.num_ranks ? header_word(call, kind, set, rank) : nullptr;
}

/// Waits for the headers of all ranks in this rank's `set` and compares them. A whole warp calls `take(rank, header)`
/// for each, also in calls that are then refused. All threads of a block; all of them, on every rank, get the same
/// outcome, and see what `take` wrote to shared memory. The last warps do the work, since the first may still be
/// sending. `look`: word loaded from first_header_word(), or null.
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
    // Acquired where no row has a flag: over nodes a header hands on rows that the network has written.
    const Payload payload = wait_payload(call, wait, word, look != nullptr ? *look : load_acquire_system(word));
    look = nullptr;
    const bool all_came = __all_sync(kAllLanes, static_cast<int>(payload.came)) != 0;
    __syncwarp();  // hands each lane's acquired stores to all lanes
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
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;  // only the first fault is reported
  fault.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  fault.rank = -1;
  fault.of_group = call.ranks.of_group ? 1 : 0;
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

/// Reports, possibly again, the reason why a dispatch of latency mode was refused. One thread of the call.
__device__ __noinline__ inline void report_refused_dispatch(const RankParams& ranks, const RouteSummary& summary) {
  FaultReport& fault = ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) == 0) fault.latency = 1;  // only for the first fault
  report_refused_route(ranks, summary);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_WORDS_CUH
