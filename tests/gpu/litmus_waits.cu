/// Waits of the protocol, by themselves.

#include "cuda/sync/rank_sync.cuh"
#include "gpu/litmus_device.cuh"

namespace ferry::test {
namespace {

using namespace cuda::device;  // NOLINT(google-build-using-namespace): what this file is about

__global__ void waits_kernel(const __grid_constant__ cuda::CrewParams crew, const PlannedWait* waits,
                             WaitOutcome* outcomes) {
  const PlannedWait& planned = waits[blockIdx.x];
  for (int i = 0; i < 2; ++i) {
    const Wait wait = {planned.awaited, planned.peer, planned.epoch};
    const std::uint64_t begin_ns = now_ns();
    const bool held = wait_flag(crew, wait, &crew.control.progress[planned.peer], planned.expected);
    outcomes[2 * blockIdx.x + i] = {held ? 1U : 0U, now_ns() - begin_ns};
  }
}

__global__ void wait_all_kernel(const __grid_constant__ cuda::CrewParams crew, std::uint64_t epoch,
                                WaitOutcome* outcomes) {
  const std::uint64_t begin_ns = now_ns();
  const bool held = wait_all_ranks(crew, cuda::Awaited::kDone, done_flags(crew), epoch, done_flags(crew));
  outcomes[lane_idx()] = {held ? 1U : 0U, now_ns() - begin_ns};
}

}  // namespace

cudaError_t launch_waits(const cuda::CrewParams& crew, const PlannedWait* waits, int num_waits, WaitOutcome* outcomes,
                         cudaStream_t stream) {
  waits_kernel<<<num_waits, 1, 0, stream>>>(crew, waits, outcomes);
  return cudaGetLastError();
}

cudaError_t launch_wait_all(const cuda::CrewParams& crew, std::uint64_t epoch, WaitOutcome* outcomes,
                            cudaStream_t stream) {
  wait_all_kernel<<<1, kWarpLanes, 0, stream>>>(crew, epoch, outcomes);
  return cudaGetLastError();
}

}  // namespace ferry::test
