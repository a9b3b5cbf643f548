#ifndef FERRY_CUDA_SYNC_PART_BARRIER_CUH
#define FERRY_CUDA_SYNC_PART_BARRIER_CUH

/// In place of src/cuda/sync/part_barrier.cuh where kernels are emulated.

#include <map>

#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// By block. Kernels that meet in other numbers use the same memory one after the other.
struct Meeting {
  int num_met = 0;  ///< of those that wait
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
  while (ferry::device::polled_load(&meeting.num_over) == num_over) {
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_PART_BARRIER_CUH
