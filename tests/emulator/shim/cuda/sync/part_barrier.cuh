#ifndef FERRY_CUDA_SYNC_PART_BARRIER_CUH
#define FERRY_CUDA_SYNC_PART_BARRIER_CUH

/// In place of src/cuda/sync/part_barrier.cuh where kernels are emulated.

#include <map>

#include "cuda/sync/memory_order.cuh"

namespace ferry::cuda::device {

/// By block: threads that have come so far.
inline std::map<const std::byte*, int> met_threads;

template <int kNumWarps>
void meet_warps() {
  int& met = met_threads[emulator::dynamic_shared()];
  constexpr int kNumThreads = kNumWarps * kWarpLanes;
  const int all = (met / kNumThreads + 1) * kNumThreads;
  ++met;
  while (polled_load(&met) < all) {
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_PART_BARRIER_CUH
