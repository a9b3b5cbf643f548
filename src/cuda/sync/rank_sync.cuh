#ifndef FERRY_CUDA_SYNC_RANK_SYNC_CUH
#define FERRY_CUDA_SYNC_RANK_SYNC_CUH

/// Protocol of a call, as blocks take part in it: waits with a deadline, and the end (all ranks are done). The entry
/// (all ranks make the same call) is in entry.cuh, the flags are in control.hpp. A wait that times out, or that the
/// host stops, sets `broken`; every other wait of this rank then ends too, and the kernel returns.

#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "cuda/sync/rank_params.hpp"
#include "cuda/sync/wait_count.cuh"

namespace ferry::cuda::device {

/// Polls of a flag between two checks of the clock and of `broken`.
inline constexpr unsigned kSpinsPerCheck = 64;

/// Polls of a flag between two polls of the host's stop word. Polls of a flag stay on the GPU (0.6 us or more each, a
/// load from its L2 cache). A poll of the stop word goes over PCIe, and those of all warps that wait, up to 1,600 in a
/// combine of latency mode, follow each other, 0.8 us each. Every 256 polls, 150 us, they kept the bus from what longer
/// calls waited for: a graph of calls of 128 tokens over nodes took 315 us a pair in place of 185. After 8192, 5 ms, or
/// 10 where the flag is in host memory, is soon enough: the host takes 5 to 10 to find a lost rank (PeerWatch), over
/// nodes 20 to 40.
inline constexpr unsigned kSpinsPerStopCheck = 128 * kSpinsPerCheck;
/// Polls that take longer on average, as emulated GPUs' may, look at the stop word with each check of the clock.
inline constexpr std::uint64_t kSlowPollNs = 20'000;

/// Outcome for this rank of the entries of all ranks.
enum class Outcome : int {
  kGo = 0,    ///< all ranks agree: move the rows
  kSkip = 1,  ///< all ranks refuse the call: keep the protocol, move no data
  kStop = 2,  ///< the group is broken: return at once
};

__device__ inline Control control_of(const RankParams& ranks, int rank) {
  return Control::at(ranks.peer_bases[rank], static_cast<std::size_t>(ranks.num_ranks));
}

__device__ inline bool is_broken(const RankParams& ranks) {
  return load_relaxed_device(&ranks.control.local->broken) != 0;
}

/// Whether the host has found that a rank for which this rank may be waiting will not arrive.
__device__ inline bool is_stopped(const RankParams& ranks) {
  return load_acquire_system(&ranks.report->stop.requested) != 0;
}

/// First of the words that show waits for the peers of a wait for `awaited`.
__device__ inline int first_waiting_word(const RankParams& ranks, Awaited awaited) {
  const bool is_rail = awaited >= Awaited::kRailCall;
  return is_rail ? WaitingWords::kRails : (ranks.of_group ? WaitingWords::kGroupRanks : 0);
}

/// Shows the host that a thread waits for `peer`. Not inlined: only threads that have waited for milliseconds call it.
/// Volatile stores are relaxed ones of system scope (PTX ISA, volatile operations); no thread waits for this one, and
/// emulated kernels count the other stores as progress.
__device__ __noinline__ inline void show_wait(const RankParams& ranks, Awaited awaited, int peer, std::uint64_t now) {
  if (awaited == Awaited::kTile) return;  // for no other rank
  volatile std::uint64_t* const words = ranks.report->waiting.words;
  words[first_waiting_word(ranks, awaited) + peer] = WaitingWords::word_of(awaited, now);
}

/// Lower 32 bits of an epoch, for 64-bit words that also carry other data.
__device__ inline std::uint64_t half_of(std::uint64_t epoch) { return epoch & 0xFFFFFFFFU; }

/// Number of the current call. Stable until `finish_call`, which runs after all blocks of the call have read it.
__device__ inline std::uint64_t current_epoch(const RankParams& ranks) { return ranks.control.local->epoch + 1; }

/// Values that a kernel reads first, all together, since each of these loads may go to memory.
struct CallStart {
  std::uint64_t epoch;
  bool broken;
  bool routed;  ///< the Routing is valid, or the call has none
};

__device__ inline CallStart start_call(const RankParams& ranks, const RouteSummary* summary) {
  const volatile LocalState& local = *ranks.control.local;
  const std::uint64_t finished = local.epoch;
  const std::uint32_t broken = local.broken;
  const std::uint32_t valid = summary != nullptr ? static_cast<const volatile RouteSummary*>(summary)->valid : 1;
  return {finished + 1, broken != 0, valid != 0};
}

struct Wait {
  Awaited awaited = Awaited::kDone;
  int peer = -1;
  std::uint64_t epoch = 0;
};

/// Last values that a failed wait saw.
struct LastLook {
  std::uint64_t seen = 0;
  std::uint64_t expected = 0;
  bool stopped = false;
};

/// Reports the first wait that fails; later ones only end. Functions that calls rarely reach are not inlined, to leave
/// the instruction cache to the others.
__device__ __noinline__ inline void declare_lost(const RankParams& ranks, const Wait& wait, const LastLook& look) {
  if (atomicCAS(&ranks.control.local->broken, 0U, 1U) != 0) return;
  LostReport& lost = ranks.report->lost;
  lost.awaited = static_cast<std::int32_t>(wait.awaited);
  lost.peer = wait.peer;
  lost.epoch = wait.epoch;
  lost.seen = look.seen;
  lost.expected = look.expected;
  lost.stopped = look.stopped ? 1 : 0;
  lost.of_group = ranks.of_group ? 1 : 0;
  fence_system();
  store_release_system(&lost.state, 1);
}

/// Factor for waits on this rank's own blocks: they may be waiting for a peer, and their wait must time out first.
inline constexpr int kOwnDeadlines = 4;

/// Time at which a wait for an event fails that began at `begin_ns`.
__device__ inline std::uint64_t deadline_of(const RankParams& ranks, Awaited awaited, std::uint64_t begin_ns) {
  const std::uint64_t tile_ns = awaited == Awaited::kTile ? tile_timeout_ns(ranks.timeout_ns) : ranks.timeout_ns;
  const std::uint64_t limit_ns = awaited == Awaited::kOwn ? ranks.timeout_ns * kOwnDeadlines : tile_ns;
  return limit_ns > ~begin_ns ? ~std::uint64_t{0} : begin_ns + limit_ns;
}

/// Waits until `read()` is at least `expected`; false if the group broke. One thread calls it. A stop ends a wait for a
/// peer only if the awaited value is still missing: a peer may have left because it was done. Waits for this rank's own
/// blocks end after those blocks have found the stop in their own waits.
template <typename Read, typename Count = NoCount>
__device__ inline bool wait_until(const RankParams& ranks, const Wait& wait, Read read, std::uint64_t expected,
                                  Count count = {}) {
  const bool own = wait.awaited == Awaited::kOwn;
  std::uint64_t begin_ns = 0;
  bool stopped = false;
  for (unsigned spin = 0;; ++spin) {
    const std::uint64_t seen = read();
    if (seen >= expected) {
      count.over(spin, begin_ns);
      return true;
    }
    count.missed(spin);
    if (stopped) {
      declare_lost(ranks, wait, {seen, expected, true});
      return false;
    }
    if (spin % kSpinsPerCheck != 0) continue;
    if (is_broken(ranks)) return false;
    const std::uint64_t now = now_ns();
    if (begin_ns == 0) begin_ns = now;
    if (now >= deadline_of(ranks, wait.awaited, begin_ns)) {
      declare_lost(ranks, wait, {seen, expected, false});
      return false;
    }
    count.looked(begin_ns, now);
    const bool is_slow = now - begin_ns > std::uint64_t{spin} * kSlowPollNs;
    if (own || spin == 0 || (spin % kSpinsPerStopCheck != 0 && !is_slow)) continue;
    show_wait(ranks, wait.awaited, wait.peer, now);
    stopped = is_stopped(ranks);  // the flag is read once more after this
  }
}

template <typename Count = NoCount>
__device__ inline bool wait_flag(const RankParams& ranks, const Wait& wait, const std::uint64_t* flag,
                                 std::uint64_t expected, Count count = {}) {
  return wait_until(
      ranks, wait, [flag] { return load_acquire_system(flag); }, expected, count);
}

/// A flag of each rank, at a fixed distance.
struct Flags {
  const std::uint64_t* first;
  std::size_t stride = 1;  ///< in words

  __device__ std::uint64_t load(int rank) const {
    return load_acquire_system(first + static_cast<std::size_t>(rank) * stride);
  }
};

__device__ inline Flags count_flags(const RankParams& ranks) { return {ranks.control.counts_ready}; }
__device__ inline Flags done_flags(const RankParams& ranks) { return {ranks.control.done}; }

/// Waits for a flag of every rank, or for `instead`. All lanes of one warp call it and get the same answer. Only one
/// warp of a kernel calls it, so its waits are counted.
template <typename AllFlags, typename OtherFlags>
__device__ inline bool wait_all_ranks(const RankParams& ranks, Awaited awaited, const AllFlags& flags,
                                      std::uint64_t epoch, const OtherFlags& instead) {
  bool all = true;
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    const auto read = [&flags, &instead, rank] {
      const std::uint64_t other = instead.load(rank);
      const std::uint64_t flag = flags.load(rank);
      return flag > other ? flag : other;
    };
    all = wait_until(ranks, {awaited, rank, epoch}, read, epoch, WaitCount(ranks, rank, rank != ranks.rank)) && all;
  }
  const bool every = __all_sync(0xFFFFFFFFU, all) != 0;
  __syncwarp();  // passes the data that each lane acquired to all lanes
  return every;
}

/// Signals every rank that this rank is done with it. All lanes of one warp call it, after everything that it publishes
/// has been made visible to this warp (block barrier or acquire).
__device__ inline void post_done(const RankParams& ranks, std::uint64_t epoch) {
  fence_async_proxy();
  fence_system();
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    store_relaxed_system(&control_of(ranks, rank).done[ranks.rank], epoch);
  }
}

/// Sets words left by earlier calls to this epoch. Words of the next epoch stay: they are from a peer that is ahead.
/// All lanes of one warp call it.
__device__ __noinline__ inline void age_words(std::uint64_t* words, std::size_t num_words, std::uint64_t epoch) {
  for (auto i = static_cast<std::size_t>(lane_idx()); i < num_words; i += kWarpLanes) {
    auto* word = reinterpret_cast<unsigned long long*>(words + i);
    const unsigned long long seen = *static_cast<volatile unsigned long long*>(word);
    if (seen >> 32 != half_of(epoch) && seen >> 32 != half_of(epoch + 1))
      atomicCAS_system(word, seen, half_of(epoch) << 32);
  }
}

/// Ends the call: the next kernel finds the next epoch. All lanes of one warp call it, after all ranks have reported
/// their last progress.
///
/// A word that holds half of an epoch must not be taken for a word of the epoch 2^32 calls later. Therefore all words
/// of progress[] and staged[] are cleared once in that many calls; peers write the next ones only after they have this
/// rank's next entry. Words of entries and of counts that calls of other kinds have left are set to this epoch, twice
/// in that many calls, when no rank polls for this epoch's words any more. A peer may be one call ahead: its words for
/// that call stay. There are 65,664 words of counts with 8 ranks and 1.1 million with 128: one thread, at 0.6 us or
/// more per load, would take 40 ms and 0.6 s while the peers wait.
__device__ __noinline__ inline void end_epoch(const RankParams& ranks, std::uint64_t epoch) {
  constexpr std::uint64_t kQuarter = 0x7FFFFFFF;
  __syncwarp();  // no lane still reads words of this epoch
  if (half_of(epoch) == 0) {
    for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) ranks.control.progress[rank] = 0;
    for (int i = lane_idx(); i < ranks.num_ranks * kMaxCallBlocks; i += kWarpLanes) ranks.control.staged[i] = 0;
  }
  if ((epoch & kQuarter) == 0) {
    const auto num_ranks = static_cast<std::size_t>(ranks.num_ranks);
    age_words(ranks.control.entries, num_ranks * kEntrySlotWords, epoch);
    age_words(ranks.control.headers, 2 * num_ranks * kCountsHeaderWords, epoch);
    age_words(ranks.control.counts, 2 * num_ranks * Control::counts_stride(num_ranks), epoch);
  }
  if (lane_idx() == 0) ranks.control.local->epoch = epoch;
}

/// Ends one block's part in the call: the block no longer reads or writes peers' memory, and its bulk stores are
/// complete. All threads of the block call it.
__device__ inline void post_block_done(const RankParams& ranks, std::uint64_t epoch, unsigned block = blockIdx.x) {
  fence_async_proxy();
  __syncthreads();
  if (warp_idx() != 0) return;
  fence_system();
  for (int rank = lane_idx(); rank < ranks.num_ranks; rank += kWarpLanes) {
    store_relaxed_system(
        control_of(ranks, rank).block_done + static_cast<std::size_t>(ranks.rank) * kMaxCallBlocks + block, epoch);
  }
}

/// Waits until all ranks are done and ends the call. All lanes of one warp of one block call it, after all other blocks
/// of the call have read the epoch.
__device__ inline bool finish_call(const RankParams& ranks, std::uint64_t epoch) {
  const bool all = wait_all_ranks(ranks, Awaited::kDone, done_flags(ranks), epoch, done_flags(ranks));
  if (all) end_epoch(ranks, epoch);
  return all;
}

/// Waits until `num_blocks` blocks of a rank are done; false if the group broke. All lanes of one warp call it; each
/// result covers the lane's own blocks. A rank's blocks share its work evenly, so the waits of one lane are counted.
__device__ inline bool wait_blocks(const RankParams& ranks, int rank, int num_blocks, std::uint64_t epoch) {
  const Awaited awaited = rank == ranks.rank ? Awaited::kOwn : Awaited::kDone;
  const std::uint64_t* words = ranks.control.block_done + static_cast<std::size_t>(rank) * kMaxCallBlocks;
  bool all = true;
  for (int block = lane_idx(); block < num_blocks; block += kWarpLanes) {
    const WaitCount count(ranks, rank, lane_idx() == 0 && rank != ranks.rank);
    all = wait_flag(ranks, {awaited, rank, epoch}, words + block, epoch, count) && all;
  }
  return all;
}

/// Waits until all blocks of all ranks are done and ends the call. All threads of one block call it, after
/// post_block_done. `num_blocks`: [R] blocks of each rank, in shared memory.
__device__ inline void finish_blocks(const RankParams& ranks, std::uint64_t epoch, const int* num_blocks) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  bool all = true;
  for (int rank = warp_idx(); rank < ranks.num_ranks; rank += num_warps) {
    all = wait_blocks(ranks, rank, num_blocks[rank], epoch) && all;
  }
  if (__syncthreads_and(static_cast<int>(all)) != 0 && warp_idx() == 0) end_epoch(ranks, epoch);
}

/// Ends a call that is refused. Ranks that made other calls have no information on this call's blocks.
__device__ __noinline__ inline void finish_refused(const RankParams& ranks, std::uint64_t epoch, int num_own_blocks) {
  bool own = true;
  if (warp_idx() == 0) own = wait_blocks(ranks, ranks.rank, num_own_blocks, epoch);
  if (__syncthreads_and(static_cast<int>(own)) == 0 || warp_idx() != 0) return;
  post_done(ranks, epoch);
  finish_call(ranks, epoch);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_RANK_SYNC_CUH
