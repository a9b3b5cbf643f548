#ifndef FERRY_CUDA_INTRANODE_DISPATCH_ARRIVALS_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_ARRIVALS_CUH

/// Arrivals as the warps of a receiving block see them: one warp polls the peers' progress, and the others poll its
/// notes in shared memory. If all warps polled the progress words, the polls of many multiprocessors would delay the
/// stores that peers make to the same part of the second-level cache.
///
///   arrived[s], shared   the watching warp   st.release.cta / ld.acquire.cta   rows of source s that have arrived,
///                                                                        copied from progress[s]

#include "cuda/intranode/dispatch_units.cuh"

namespace ferry::cuda::device {

/// Value of arrived[s] after the group broke: no more rows will arrive.
inline constexpr std::uint32_t kNoMoreRows = 0xFFFFFFFF;

/// Notes in `arrived`, [R] and initially 0, the rows that have arrived from each source, until all have arrived or the
/// group broke. All lanes of the watching warp call it.
__device__ __noinline__ inline void watch_arrivals(const DispatchParams& params, std::uint64_t epoch,
                                                   std::uint32_t* arrived) {
  const RankParams& ranks = params.ranks;
  for (bool waits = true; waits;) {
    waits = false;
    for (int source = lane_idx(); source < ranks.num_ranks; source += kWarpLanes) {
      const auto num_rows = static_cast<std::uint32_t>(run_from(params, source).num_rows);
      const std::uint32_t noted = load_acquire_block(arrived + source);
      if (noted >= num_rows) continue;
      const std::uint64_t* flag = ranks.control.progress + source;
      // Noted inside the poll, because lanes may leave this wait together.
      const auto read = [flag, epoch, noted, arrived, source] {
        const std::uint64_t rows = rows_reported(load_acquire_system(flag), epoch);
        if (rows > noted) store_release_block(arrived + source, static_cast<std::uint32_t>(rows));
        return rows;
      };
      if (!wait_until(ranks, {Awaited::kRows, source, epoch}, read, std::uint64_t{noted} + 1,
                      StepCount(ranks, source))) {
        store_release_block(arrived + source, kNoMoreRows);
      }
      waits = true;
    }
  }
}

/// Waits until the first `num_rows` rows of `source` have arrived and the copy engine may load them; false if the group
/// broke. All lanes call it.
__device__ inline bool await_rows(const std::uint32_t* arrived, int source, std::int32_t num_rows) {
  // The loop is bounded because the watching warp's waits are.
  for (;;) {
    std::uint32_t seen = 0;
    if (lane_idx() == 0) seen = load_acquire_block(arrived + source);
    seen = __shfl_sync(kAllLanes, seen, 0);
    if (seen < static_cast<std::uint32_t>(num_rows)) continue;
    __syncwarp();  // passes the data that lane 0 acquired to all lanes
    fence_async_proxy();
    return seen != kNoMoreRows;
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_ARRIVALS_CUH
