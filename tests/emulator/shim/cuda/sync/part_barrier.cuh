#ifndef FERRY_CUDA_SYNC_PART_BARRIER_CUH
#define FERRY_CUDA_SYNC_PART_BARRIER_CUH

/// Replaces src/cuda/sync/part_barrier.cuh where kernels are emulated.

#include <map>

#include "cuda/sync/memory_order.cuh"

namespace ferry::cuda::device {

/// Meetings by block. Kernels with other numbers of warps use the same memory one after another.
struct Meeting {
  int num_met = 0;  ///< number of waiting threads
  int num_over = 0;
};
inline std::map<const std::byte*, Meeting> meetings;

template <int kNumWarps>
void meet_warps() {
  Meeting& meeting = meetings[emulator::dynamic_shared()];
  const int num_over = meeting.num_over;
  if (++meeting.num_met == kNumWarps * kWarpLanes) {
    meeting.num_met = 0;
    ++meeting.num_over;
  }
  while (polled_load(&meeting.num_over) == num_over) {
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_PART_BARRIER_CUH
