#ifndef FERRY_CUDA_SYNC_WAIT_COUNT_CUH
#define FERRY_CUDA_SYNC_WAIT_COUNT_CUH

/// Counts, for the host, how long kernels wait for each rank (WaitTimes in report.hpp). One thread counts waits for
/// ranks to enter a call and to leave it, from beginning to end. If many threads wait for rows and words of a rank at
/// the same time, each thread adds the time since it began, or since another thread last counted, when it reads the
/// clock anyway: so polls in between get no extra work, and no time is counted twice.

#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda::device {

/// Words that add up the waits of many concurrent threads.
struct WaitWords {
  std::uint64_t* sum_ns;
  std::uint64_t* until_ns;     ///< time up to which waits are counted, or are being counted by a WaitCount
  std::uint64_t* reported_ns;  ///< the host's copy of the sum
};

/// Counts the time that a thread has waited from `start_ns` to `now`, while the wait continues. Sums reported at the
/// same time may overtake each other: the host sees the higher one with the next step.
__device__ inline void count_step(const WaitWords& words, std::uint64_t start_ns, std::uint64_t now) {
  if (load_relaxed_system(words.until_ns) >= now) return;
  const std::uint64_t until_ns = raise_device(words.until_ns, now);
  const std::uint64_t from_ns = until_ns > start_ns ? until_ns : start_ns;
  if (from_ns >= now) return;
  const std::uint64_t step_ns = now - from_ns;
  const std::uint64_t sum_ns = add_relaxed_device(words.sum_ns, step_ns) + step_ns;
  store_relaxed_system(words.reported_ns, sum_ns);
}

/// Counts a wait for a rank of the node or of the group, except for this rank itself. Not inlined: only waiting threads
/// use it.
__device__ __noinline__ inline void count_step(const RankParams& ranks, int rank, std::uint64_t start_ns,
                                               std::uint64_t now) {
  if (rank == ranks.rank) return;
  LocalState& local = *ranks.control.local;
  WaitTimes& waits = ranks.report->waits;
  if (ranks.of_group) {
    const WaitWords words{local.group_wait_ns + rank, local.group_counted_until_ns + rank, waits.group_ns + rank};
    count_step(words, start_ns, now);
    return;
  }
  const WaitWords words{local.step_wait_ns + rank, local.counted_until_ns + rank, waits.steps_ns + rank};
  count_step(words, start_ns, now);
}

/// Polls after which a wait is counted. Shorter waits are not counted and cost nothing: flags of ranks that arrive
/// together are set after two or three polls, so a rank that is counted is about 5 us late.
inline constexpr unsigned kUncountedPolls = 8;

/// Adds up, for the host, one thread's waits for a rank, which stand for those of the whole kernel. Threads that count
/// for the same rank run one after another.
class WaitCount {
 public:
  /// `counts`: whether this thread counts.
  __device__ WaitCount(const RankParams& ranks, int rank, bool counts) : ranks_(ranks), rank_(rank), counts_(counts) {}

  /// Called when a poll has failed. Meanwhile loads the sum to which it will add.
  __device__ void missed(unsigned spin) {
    if (counts_ && spin == kUncountedPolls) {
      before_ns_ = *static_cast<const volatile std::uint64_t*>(ranks_.control.local->wait_ns + rank_);
      store_relaxed_system(ranks_.control.local->counted_until_ns + rank_, ~std::uint64_t{0});
    }
  }
  /// Called when the thread has read the clock.
  __device__ void looked(std::uint64_t /*start_ns*/, std::uint64_t /*now*/) const {}
  /// Called when the wait is over. Does not wait for its stores.
  __device__ void over(unsigned spin, std::uint64_t start_ns) const {
    if (!counts_ || spin <= kUncountedPolls) return;
    const std::uint64_t now = now_ns();
    const std::uint64_t sum_ns = before_ns_ + (now - start_ns);
    store_relaxed_system(ranks_.control.local->wait_ns + rank_, sum_ns);
    store_relaxed_system(ranks_.report->waits.ns + rank_, sum_ns);
    store_relaxed_system(ranks_.control.local->counted_until_ns + rank_, now);
  }

 private:
  const RankParams& ranks_;
  int rank_;
  bool counts_;
  std::uint64_t before_ns_ = 0;
};

/// Counts a thread's wait for a rank for which other threads may be waiting too. A rank's wait for itself is not
/// counted.
class StepCount {
 public:
  __device__ StepCount(const RankParams& ranks, int rank) : ranks_(ranks), rank_(rank) {}

  __device__ void missed(unsigned /*spin*/) const {}
  __device__ void looked(std::uint64_t start_ns, std::uint64_t now) const {
    if (now != start_ns) count_step(ranks_, rank_, start_ns, now);
  }
  __device__ void over(unsigned /*spin*/, std::uint64_t /*start_ns*/) const {}

 private:
  const RankParams& ranks_;
  int rank_;
};

/// A wait that is not counted.
struct NoCount {
  __device__ void missed(unsigned /*spin*/) const {}
  __device__ void looked(std::uint64_t /*start_ns*/, std::uint64_t /*now*/) const {}
  __device__ void over(unsigned /*spin*/, std::uint64_t /*start_ns*/) const {}
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WAIT_COUNT_CUH
