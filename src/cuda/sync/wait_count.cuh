#ifndef FERRY_CUDA_SYNC_WAIT_COUNT_CUH
#define FERRY_CUDA_SYNC_WAIT_COUNT_CUH

/// How kernels count what they wait for each rank, for the host (WaitTimes in report.hpp). Waits for ranks to come to a
/// call and to leave it are counted from their beginning to their end, by one thread. Where many threads wait for rows
/// and words of a rank at the same time, each adds what has gone by since it began, or since others have counted last,
/// where it looks at the clock anyway: so nothing is added to the polls in between, and no time is counted twice.

#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda::device {

/// Where waits are added up that many threads have at once.
struct WaitWords {
  std::uint64_t* sum_ns;
  std::uint64_t* until_ns;     ///< what is over by then is counted, or a WaitCount does it
  std::uint64_t* reported_ns;  ///< the host's
};

/// A thread has waited from `start_ns` to `now`, and goes on. Sums that are reported at the same time may overtake each
/// other: the host sees the higher one with the next step.
__device__ inline void count_step(const WaitWords& words, std::uint64_t start_ns, std::uint64_t now) {
  if (load_relaxed_system(words.until_ns) >= now) return;
  const std::uint64_t until_ns = raise_device(words.until_ns, now);
  const std::uint64_t from_ns = until_ns > start_ns ? until_ns : start_ns;
  if (from_ns >= now) return;
  const std::uint64_t step_ns = now - from_ns;
  const std::uint64_t sum_ns = add_relaxed_device(words.sum_ns, step_ns) + step_ns;
  store_relaxed_system(words.reported_ns, sum_ns);
}

/// The same of a wait for a rank of the node; not for this rank itself. Not inlined: it is for those who wait.
__device__ __noinline__ inline void count_step(const RankParams& ranks, int rank, std::uint64_t start_ns,
                                               std::uint64_t now) {
  if (rank == ranks.rank) return;
  LocalState& local = *ranks.control.local;
  const WaitWords words{local.step_wait_ns + rank, local.counted_until_ns + rank, ranks.report->waits.steps_ns + rank};
  count_step(words, start_ns, now);
}

/// Waits that are over by then are not counted, and cost nothing: the flags of ranks that come together are there after
/// two or three polls, so a rank that is counted is some 5 us late.
inline constexpr unsigned kUncountedPolls = 8;

/// One thread's waits for a rank, which stand for those of the whole kernel: it adds them up for the host. All threads
/// that do so for the same rank come after each other.
class WaitCount {
 public:
  /// `counts`: this thread is that one.
  __device__ WaitCount(const RankParams& ranks, int rank, bool counts) : ranks_(ranks), rank_(rank), counts_(counts) {}

  /// A poll has failed. Loads meanwhile what there is to add to.
  __device__ void missed(unsigned spin) {
    if (counts_ && spin == kUncountedPolls) {
      before_ns_ = *static_cast<const volatile std::uint64_t*>(ranks_.control.local->wait_ns + rank_);
      store_relaxed_system(ranks_.control.local->counted_until_ns + rank_, ~std::uint64_t{0});
    }
  }
  /// The thread has looked at the clock.
  __device__ void looked(std::uint64_t /*start_ns*/, std::uint64_t /*now*/) const {}
  /// The wait is over. Nothing here is waited for.
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

/// A thread's wait for a rank for which others may be waiting too; of this rank for itself nothing is counted.
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

/// A wait that nobody counts.
struct NoCount {
  __device__ void missed(unsigned /*spin*/) const {}
  __device__ void looked(std::uint64_t /*start_ns*/, std::uint64_t /*now*/) const {}
  __device__ void over(unsigned /*spin*/, std::uint64_t /*start_ns*/) const {}
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WAIT_COUNT_CUH
