#ifndef FERRY_CUDA_SYNC_RANK_SYNC_CUH
#define FERRY_CUDA_SYNC_RANK_SYNC_CUH

/// The protocol of a call, as blocks take part in it: entry (everybody makes the same call), waits with a deadline, and
/// the end (everybody is done). See control.hpp for the flags. A wait that expires sets `broken`; every other wait of
/// this rank then ends too, and the kernel returns.

#include <cstdint>

#include "cuda/intranode/routing_tables.hpp"
#include "cuda/sync/memory_order.cuh"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda::device {

inline constexpr int kWarpLanes = 32;
/// Looks at a flag between two looks at the clock and at `broken`.
inline constexpr unsigned kSpinsPerCheck = 64;

__device__ inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_idx() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

/// How a call goes for this rank.
enum class Outcome : int {
  kGo = 0,    ///< all ranks agree: move the rows
  kSkip = 1,  ///< the call is refused by all: keep the protocol, move nothing
  kStop = 2,  ///< the group is broken: return at once
};

__device__ inline Control control_of(const CrewParams& crew, int rank) {
  return Control::at(crew.peer_bases[rank], static_cast<std::size_t>(crew.num_ranks));
}

__device__ inline bool is_broken(const CrewParams& crew) {
  return load_relaxed_device(&crew.control.local->broken) != 0;
}

/// The number of the call that is being made. Stable until `finish_call`, which all blocks of the call precede.
__device__ inline std::uint64_t current_epoch(const CrewParams& crew) { return crew.control.local->epoch + 1; }

struct Wait {
  Awaited awaited = Awaited::kDone;
  int peer = -1;
  std::uint64_t epoch = 0;
};

/// The first wait to expire says so; the others only end.
__device__ inline void declare_lost(const CrewParams& crew, const Wait& wait, std::uint64_t seen,
                                    std::uint64_t expected) {
  if (atomicCAS(&crew.control.local->broken, 0U, 1U) != 0) return;
  LostReport& lost = crew.report->lost;
  lost.awaited = static_cast<std::int32_t>(wait.awaited);
  lost.peer = wait.peer;
  lost.epoch = wait.epoch;
  lost.seen = seen;
  lost.expected = expected;
  fence_system();
  store_release_system(&lost.state, 1);
}

/// This rank's own blocks may wait for a peer themselves, and it is they who should say so.
inline constexpr int kOwnDeadlines = 4;

/// Waits until `read()` is at least `expected`; false when the group broke meanwhile. For one thread.
template <typename Read>
__device__ inline bool wait_until(const CrewParams& crew, const Wait& wait, Read read, std::uint64_t expected) {
  std::uint64_t deadline_ns = 0;
  for (unsigned spin = 0;; ++spin) {
    const std::uint64_t seen = read();
    if (seen >= expected) return true;
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(crew)) return false;
    const std::uint64_t now = now_ns();
    if (deadline_ns == 0) deadline_ns = now + crew.timeout_ns * (wait.awaited == Awaited::kOwn ? kOwnDeadlines : 1);
    if (now < deadline_ns) continue;
    declare_lost(crew, wait, seen, expected);
    return false;
  }
}

__device__ inline bool wait_flag(const CrewParams& crew, const Wait& wait, const std::uint64_t* flag,
                                 std::uint64_t expected) {
  return wait_until(
      crew, wait, [flag] { return load_acquire_system(flag); }, expected);
}

/// A flag of every rank, at equal distance.
struct Flags {
  const std::uint64_t* first;
  std::size_t stride = 1;  ///< in words

  __device__ std::uint64_t load(int rank) const {
    return load_acquire_system(first + static_cast<std::size_t>(rank) * stride);
  }
};

__device__ inline Flags entry_flags(const CrewParams& crew) {
  return {&crew.control.messages[0].epoch, sizeof(EntryMessage) / sizeof(std::uint64_t)};
}
__device__ inline Flags count_flags(const CrewParams& crew) { return {crew.control.counts_ready}; }
__device__ inline Flags done_flags(const CrewParams& crew) { return {crew.control.done}; }

/// Waits for a flag of every rank, or `instead` of it; all lanes of one warp call it and get the same answer.
__device__ inline bool wait_all_ranks(const CrewParams& crew, Awaited awaited, Flags flags, std::uint64_t epoch,
                                      Flags instead) {
  bool all = true;
  for (int rank = lane_idx(); rank < crew.num_ranks; rank += kWarpLanes) {
    const auto read = [&flags, &instead, rank] {
      const std::uint64_t other = instead.load(rank);
      const std::uint64_t flag = flags.load(rank);
      return flag > other ? flag : other;
    };
    all = wait_until(crew, {awaited, rank, epoch}, read, epoch) && all;
  }
  const bool every = __all_sync(0xFFFFFFFFU, all) != 0;
  __syncwarp();  // hands what each lane has acquired to all of them
  return every;
}

/// The host's record of a rank's call in this epoch, whatever call it is.
__device__ inline std::int64_t ticket_of(const CrewParams& crew, int rank, std::uint64_t epoch) {
  if (count_flags(crew).load(rank) >= epoch && entry_flags(crew).load(rank) < epoch) {
    const std::uint64_t place = epoch % 2 * static_cast<std::uint64_t>(crew.num_ranks);
    return static_cast<const volatile CountsHeader&>(crew.control.headers[place + static_cast<std::uint64_t>(rank)])
        .ticket;
  }
  return static_cast<const volatile EntryMessage&>(crew.control.messages[rank]).ticket;
}

/// Tells every rank this rank's part in the call. All lanes of one warp of one block.
__device__ inline void post_entry(const CrewParams& crew, const EntryParams& entry, std::uint64_t epoch) {
  for (int rank = lane_idx(); rank < crew.num_ranks; rank += kWarpLanes) {
    EntryMessage& message = control_of(crew, rank).messages[crew.rank];
    message.agreement = entry.agreement;
    message.ticket = entry.ticket;
    message.rows_offset = entry.rows_offset;
    message.rows_stride = entry.rows_stride;
    message.records_offset = entry.records_offset;
    message.flags = entry.flags;
    message.scales_offset = entry.scales_offset;
    message.scales_stride = entry.scales_stride;
    message.ids_offset = entry.ids_offset;
    message.weights_offset = entry.weights_offset;
    fence_system();
    store_release_system(&message.epoch, epoch);
  }
}

/// Waits for everybody's entry and compares. All threads of a block; the same answer for all of them, on every rank.
__device__ inline Outcome await_entries(const CrewParams& crew, const EntryParams& entry, std::uint64_t epoch) {
  __shared__ Outcome outcome;
  if (warp_idx() == 0) {
    // A rank that routes instead posts counts.
    const bool here = wait_all_ranks(crew, Awaited::kEntry, entry_flags(crew), epoch, count_flags(crew));
    bool equal = true;
    for (int rank = lane_idx(); here && rank < crew.num_ranks; rank += kWarpLanes) {
      const volatile EntryMessage& message = crew.control.messages[rank];
      const bool same_kind = entry_flags(crew).load(rank) >= epoch;
      equal = equal && same_kind && message.agreement == entry.agreement && message.agreement != 0;
    }
    const bool all_equal = __all_sync(0xFFFFFFFFU, equal) != 0;
    if (lane_idx() == 0) outcome = !here ? Outcome::kStop : all_equal ? Outcome::kGo : Outcome::kSkip;
  }
  __syncthreads();
  fence_async_proxy();  // what peers did before is also before this rank's bulk copies
  return outcome;
}

/// Tells the host that ranks disagree. One thread of the call.
__device__ inline void report_disagreement(const CrewParams& crew, std::uint64_t epoch) {
  FaultReport& fault = crew.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;  // the first one counts
  fault.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  fault.rank = -1;
  for (int rank = 0; rank < crew.num_ranks; ++rank) fault.tickets[rank] = ticket_of(crew, rank, epoch);
  fence_system();
  store_release_system(&fault.state, 1);
}

/// The host hears again of a Routing that route refused. One thread of the call.
__device__ inline void report_refused_route(const CrewParams& crew, const RouteSummary& summary) {
  FaultReport& fault = crew.report->fault;
  if (*static_cast<volatile std::uint64_t*>(&fault.state) != 0) return;
  fault.fault = summary.fault;
  fault.rank = static_cast<std::int32_t>(summary.fault_rank);
  fault.row = summary.fault_row;
  fault.column = summary.fault_column;
  fault.value = summary.fault_value;
  fault.limit = summary.fault_limit;
  for (int rank = 0; rank < crew.num_ranks; ++rank) fault.tickets[rank] = -1;
  fence_system();
  store_release_system(&fault.state, 1);
}

/// Tells every rank that this one is done with it. All lanes of one warp, after whatever it publishes was made visible
/// to this warp (block barrier or acquire) by those who did it.
__device__ inline void post_done(const CrewParams& crew, std::uint64_t epoch) {
  fence_async_proxy();
  fence_system();
  for (int rank = lane_idx(); rank < crew.num_ranks; rank += kWarpLanes) {
    store_release_system(&control_of(crew, rank).done[crew.rank], epoch);
  }
}

/// Waits until everybody is done and ends the call. All lanes of one warp of one block, after all other blocks of the
/// call have read the epoch.
__device__ inline bool finish_call(const CrewParams& crew, std::uint64_t epoch) {
  const bool all = wait_all_ranks(crew, Awaited::kDone, done_flags(crew), epoch, done_flags(crew));
  if (all && lane_idx() == 0) crew.control.local->epoch = epoch;
  return all;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_RANK_SYNC_CUH
