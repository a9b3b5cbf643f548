/// Waits of the protocol, each tested alone.

#include "cuda/intranode/dispatch_receive.cuh"
#include "cuda/sync/chunks.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): the primitives under test

__global__ void waits_kernel(const __grid_constant__ cuda::RankParams ranks, const PlannedWait* waits,
                             WaitOutcome* outcomes) {
  const PlannedWait& planned = waits[blockIdx.x];
  for (int i = 0; i < 2; ++i) {
    const Wait wait = {planned.awaited, planned.peer, planned.epoch};
    const std::uint64_t begin_ns = now_ns();
    std::uint64_t seen = 0;
    const bool held =
        planned.awaited == cuda::Awaited::kRows
            ? wait_rows(ranks, planned.peer, planned.epoch, static_cast<std::int64_t>(planned.expected), seen)
            : wait_flag(ranks, wait, &ranks.control.progress[planned.peer], planned.expected);
    outcomes[2 * blockIdx.x + i] = {held ? 1U : 0U, now_ns() - begin_ns};
  }
}

__global__ void wait_all_kernel(const __grid_constant__ cuda::RankParams ranks, std::uint64_t epoch,
                                WaitOutcome* outcomes) {
  const std::uint64_t begin_ns = now_ns();
  const bool held = wait_all_ranks(ranks, cuda::Awaited::kDone, done_flags(ranks), epoch, done_flags(ranks));
  outcomes[lane_idx()] = {held ? 1U : 0U, now_ns() - begin_ns};
}

/// One warp that receives, and one that watches for it.
__global__ void arrivals_kernel(const __grid_constant__ cuda::DispatchParams params, std::uint64_t epoch, int num_calls,
                                std::int32_t* rows) {
  __shared__ std::uint32_t arrived[cuda::kMaxRanks];
  if (threadIdx.x < static_cast<unsigned>(params.ranks.num_ranks)) arrived[threadIdx.x] = 0;
  __syncthreads();
  if (warp_idx() != 0) {
    watch_arrivals(params, epoch, arrived);
    return;
  }
  Arrivals arrivals(params, arrived, 0, 1);
  for (int i = 0; i < num_calls; ++i) {
    const std::int32_t row = arrivals.next();
    if (lane_idx() == 0) rows[i] = row;
  }
}

__global__ void finish_call_kernel(const __grid_constant__ cuda::RankParams ranks, std::uint64_t epoch,
                                   WaitOutcome* outcomes) {
  const std::uint64_t begin_ns = now_ns();
  const bool held = finish_call(ranks, epoch);
  outcomes[lane_idx()] = {held ? 1U : 0U, now_ns() - begin_ns};
}

}  // namespace

cudaError_t launch_waits(const cuda::RankParams& ranks, const PlannedWait* waits, int num_waits, WaitOutcome* outcomes,
                         cudaStream_t stream) {
  waits_kernel<<<num_waits, 1, 0, stream>>>(ranks, waits, outcomes);
  return cudaGetLastError();
}

cudaError_t launch_wait_all(const cuda::RankParams& ranks, std::uint64_t epoch, WaitOutcome* outcomes,
                            cudaStream_t stream) {
  wait_all_kernel<<<1, kWarpLanes, 0, stream>>>(ranks, epoch, outcomes);
  return cudaGetLastError();
}

cudaError_t launch_arrivals(const cuda::RankParams& ranks, std::uint64_t epoch, const std::int32_t* source_base,
                            int num_calls, std::int32_t* rows, cudaStream_t stream) {
  cuda::DispatchParams params;
  params.ranks = ranks;
  params.source_base = source_base;
  arrivals_kernel<<<1, 2 * kWarpLanes, 0, stream>>>(params, epoch, num_calls, rows);
  return cudaGetLastError();
}

cudaError_t launch_finish_call(const cuda::RankParams& ranks, std::uint64_t epoch, WaitOutcome* outcomes,
                               cudaStream_t stream) {
  finish_call_kernel<<<1, kWarpLanes, 0, stream>>>(ranks, epoch, outcomes);
  return cudaGetLastError();
}

}  // namespace ferry::test
