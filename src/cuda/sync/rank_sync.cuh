#ifndef FERRY_CUDA_SYNC_RANK_SYNC_CUH
#define FERRY_CUDA_SYNC_RANK_SYNC_CUH

/// The protocol of a call, as blocks take part in it: entry (all ranks make the same call), waits with a deadline, and
/// the end (all ranks are done). See control.hpp for the flags. A wait that times out, or that the host stops, sets
/// `broken`; every other wait of this rank then ends too, and the kernel returns.

#include <cstdint>

#include "cuda/sync/memory_order.cuh"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda::device {

/// Polls of a flag between two checks of the clock and of `broken`.
inline constexpr unsigned kSpinsPerCheck = 64;

/// Polls of a flag between two looks at the host's stop word. Polls stay on the GPU (0.6 us and more each, a load from
/// its L2 cache); the look goes over PCIe (1 to 2 us) and so takes at most a hundredth of a waiting warp's time, and
/// nothing of a wait shorter than 150 us. The host is slower to find that somebody is lost (20 ms, PeerWatch).
inline constexpr unsigned kSpinsPerStopCheck = 4 * kSpinsPerCheck;

/// What the entry of all ranks means for this one.
enum class Outcome : int {
  kGo = 0,    ///< all ranks agree: move the rows
  kSkip = 1,  ///< the call is refused by all: keep the protocol, move nothing
  kStop = 2,  ///< the group is broken: return at once
};

__device__ inline Control control_of(const RankParams& ranks, int rank) {
  return Control::at(ranks.peer_bases[rank], static_cast<std::size_t>(ranks.num_ranks));
}

__device__ inline bool is_broken(const RankParams& ranks) {
  return load_relaxed_device(&ranks.control.local->broken) != 0;
}

/// Whether the host knows that somebody this rank may be waiting for will not come.
__device__ inline bool is_stopped(const RankParams& ranks) {
  return load_acquire_system(&ranks.report->stop.requested) != 0;
}

/// The number of the current call. Stable until `finish_call`, which all blocks of the call precede.
__device__ inline std::uint64_t current_epoch(const RankParams& ranks) { return ranks.control.local->epoch + 1; }

struct Wait {
  Awaited awaited = Awaited::kDone;
  int peer = -1;
  std::uint64_t epoch = 0;
};

/// What a wait that fails saw last.
struct LastLook {
  std::uint64_t seen = 0;
  std::uint64_t expected = 0;
  bool stopped = false;
};

/// The first wait to fail is reported; the others only end.
__device__ inline void declare_lost(const RankParams& ranks, const Wait& wait, const LastLook& look) {
  if (atomicCAS(&ranks.control.local->broken, 0U, 1U) != 0) return;
  LostReport& lost = ranks.report->lost;
  lost.awaited = static_cast<std::int32_t>(wait.awaited);
  lost.peer = wait.peer;
  lost.epoch = wait.epoch;
  lost.seen = look.seen;
  lost.expected = look.expected;
  lost.stopped = look.stopped ? 1 : 0;
  fence_system();
  store_release_system(&lost.state, 1);
}

/// This rank's own blocks may be waiting for a peer, and then it is their wait that must time out first.
inline constexpr int kOwnDeadlines = 4;

/// Waits until `read()` is at least `expected`; false when the group broke. Called by one thread. A stop ends a wait
/// for a peer only if what it waits for is still not there: a peer may have left because it was done. Waits for this
/// rank's own blocks end when those have found the stop in waits of their own.
template <typename Read>
__device__ inline bool wait_until(const RankParams& ranks, const Wait& wait, Read read, std::uint64_t expected) {
  const bool own = wait.awaited == Awaited::kOwn;
  std::uint64_t deadline_ns = 0;
  bool stopped = false;
  for (unsigned spin = 0;; ++spin) {
    const std::uint64_t seen = read();
    if (seen >= expected) return true;
    if (stopped) {
      declare_lost(ranks, wait, {seen, expected, true});
      return false;
    }
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(ranks)) return false;
    const std::uint64_t now = now_ns();
    if (deadline_ns == 0) deadline_ns = now + ranks.timeout_ns * (own ? kOwnDeadlines : 1);
    if (now >= deadline_ns) {
      declare_lost(ranks, wait, {seen, expected, false});
      return false;
    }
    if (own || spin == 0 || spin % kSpinsPerStopCheck != 0) continue;
    stopped = is_stopped(ranks);  // the flag is read once more after it
  }
}

__device__ inline bool wait_flag(const RankParams& ranks, const Wait& wait, const std::uint64_t* flag,
                                 std::uint64_t expected) {
  return wait_until(
      ranks, wait, [flag] { return load_acquire_system(flag); }, expected);
}

/// A flag of every rank, at equal distance.
struct Flags {
  const std::uint64_t* first;
  std::size_t stride = 1;  ///< in words

  __device__ std::uint64_t load(int rank) const {
    return load_acquire_system(first + static_cast<std::size_t>(rank) * stride);
  }
};

__device__ inline Flags entry_flags(const RankParams& ranks) {
  return {&ranks.control.messages[0].epoch, sizeof(EntryMessage) / sizeof(std::uint64_t)};
}
__device__ inline Flags count_flags(const RankParams& ranks) { return {ranks.control.counts_ready}; }
__device__ inline Flags done_flags(const RankParams& ranks) { return {ranks.control.done}; }

/// Waits for a flag of every rank, or `instead` of it; all lanes of one warp call it and get the same answer.
__device__ inline bool wait_all_ranks(const RankParams& ranks, Awaited awaited, Flags flags, std::uint64_t epoch,
                                      Flags instead) {
  bool all = true;
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    const auto read = [&flags, &instead, rank] {
      const std::uint64_t other = instead.load(rank);
      const std::uint64_t flag = flags.load(rank);
      return flag > other ? flag : other;
    };
    all = wait_until(ranks, {awaited, rank, epoch}, read, epoch) && all;
  }
  const bool every = __all_sync(0xFFFFFFFFU, all) != 0;
  __syncwarp();  // hands what each lane has acquired to all of them
  return every;
}

/// The number of a rank's call record in this epoch, whatever call it makes.
__device__ inline std::int64_t record_number_of(const RankParams& ranks, int rank, std::uint64_t epoch) {
  if (count_flags(ranks).load(rank) >= epoch && entry_flags(ranks).load(rank) < epoch) {
    const std::uint64_t first = epoch % 2 * static_cast<std::uint64_t>(ranks.num_ranks);
    return static_cast<const volatile CountsHeader&>(ranks.control.headers[first + static_cast<std::uint64_t>(rank)])
        .record_number;
  }
  return static_cast<const volatile EntryMessage&>(ranks.control.messages[rank]).record_number;
}

/// Sends every rank this rank's part in the call. All lanes of one warp of one block.
__device__ inline void post_entry(const RankParams& ranks, const EntryMessage& entry, std::uint64_t epoch) {
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    EntryMessage& message = control_of(ranks, rank).messages[ranks.rank];
    message.agreement = entry.agreement;
    message.record_number = entry.record_number;
    message.rows_offset = entry.rows_offset;
    message.rows_stride = entry.rows_stride;
    message.tables_offset = entry.tables_offset;
    message.flags = entry.flags;
    message.scales_offset = entry.scales_offset;
    message.scales_stride = entry.scales_stride;
    message.ids_offset = entry.ids_offset;
    message.weights_offset = entry.weights_offset;
    fence_system();
    store_release_system(&message.epoch, epoch);
  }
}

/// Waits for the entries of all ranks and compares them. All threads of a block; all of them, on every rank, get the
/// same outcome.
__device__ inline Outcome await_entries(const RankParams& ranks, const EntryMessage& entry, std::uint64_t epoch) {
  __shared__ Outcome outcome;
  if (warp_idx() == 0) {
    // A rank that routes instead posts counts.
    const bool here = wait_all_ranks(ranks, Awaited::kEntry, entry_flags(ranks), epoch, count_flags(ranks));
    bool equal = true;
    for (int rank = lane_idx(); here && rank < ranks.num_ranks; rank += kWarpLanes) {
      const volatile EntryMessage& message = ranks.control.messages[rank];
      const bool same_kind = entry_flags(ranks).load(rank) >= epoch;
      equal = equal && same_kind && message.agreement == entry.agreement && message.agreement != 0;
    }
    const bool all_equal = __all_sync(0xFFFFFFFFU, equal) != 0;
    if (lane_idx() == 0) outcome = !here ? Outcome::kStop : all_equal ? Outcome::kGo : Outcome::kSkip;
  }
  __syncthreads();
  fence_async_proxy();  // what peers did before is also before this rank's bulk copies
  return outcome;
}

/// Reports to the host that ranks disagree. One thread of the call.
__device__ inline void report_disagreement(const RankParams& ranks, std::uint64_t epoch) {
  FaultReport& fault = ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;  // the first one counts
  fault.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  fault.rank = -1;
  for (int rank = 0; rank < ranks.num_ranks; ++rank) fault.record_numbers[rank] = record_number_of(ranks, rank, epoch);
  fence_system();
  store_release_system(&fault.state, 1);
}

/// Reports once more a Routing that route refused. One thread of the call.
__device__ inline void report_refused_route(const RankParams& ranks, const RouteSummary& summary) {
  FaultReport& fault = ranks.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;
  fault.fault = summary.fault;
  fault.rank = static_cast<std::int32_t>(summary.fault_rank);
  fault.row = summary.fault_row;
  fault.column = summary.fault_column;
  fault.value = summary.fault_value;
  fault.limit = summary.fault_limit;
  for (int rank = 0; rank < ranks.num_ranks; ++rank) fault.record_numbers[rank] = -1;
  fence_system();
  store_release_system(&fault.state, 1);
}

/// Signals every rank that this one is done with it. All lanes of one warp, after everything that it publishes has been
/// made visible to this warp (block barrier or acquire).
__device__ inline void post_done(const RankParams& ranks, std::uint64_t epoch) {
  fence_async_proxy();
  fence_system();
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    store_release_system(&control_of(ranks, rank).done[ranks.rank], epoch);
  }
}

/// The call is over: the next kernel finds the next epoch. One thread, when no rank reports progress any more.
///
/// progress[] holds half of an epoch. So that no word is ever met again by the epoch 2^32 calls later, all are cleared
/// once in that many; peers write the next ones only after they have this rank's next entry message.
__device__ inline void end_epoch(const RankParams& ranks, std::uint64_t epoch) {
  if ((epoch & 0xFFFFFFFFU) == 0) {
    for (int rank = 0; rank < ranks.num_ranks; ++rank) ranks.control.progress[rank] = 0;
  }
  ranks.control.local->epoch = epoch;
}

/// Waits until all ranks are done and ends the call. All lanes of one warp of one block, after all other blocks of the
/// call have read the epoch.
__device__ inline bool finish_call(const RankParams& ranks, std::uint64_t epoch) {
  const bool all = wait_all_ranks(ranks, Awaited::kDone, done_flags(ranks), epoch, done_flags(ranks));
  if (all && lane_idx() == 0) end_epoch(ranks, epoch);
  return all;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_RANK_SYNC_CUH
