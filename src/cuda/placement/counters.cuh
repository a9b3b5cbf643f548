#ifndef FERRY_CUDA_PLACEMENT_COUNTERS_CUH
#define FERRY_CUDA_PLACEMENT_COUNTERS_CUH

/// Adds the counts of a valid route to the program's counters, in the one block that has these counts.

#include <cstdint>

#include "cuda/placement/counters.hpp"

namespace ferry::cuda::device {

/// Atomic, because several homes of an expert add to one entry.
__device__ inline void add_to_counter(const CounterTable& counter, int at, std::int32_t count) {
  if (count == 0) return;
  if (counter.wide) {
    atomicAdd(static_cast<unsigned long long*>(counter.data) + at, static_cast<unsigned long long>(count));
  } else {
    atomicAdd(static_cast<unsigned*>(counter.data) + at, static_cast<unsigned>(count));
  }
}

/// own(expert): rows of this rank's tokens for the expert; received(local): rows of all ranks for a local expert;
/// homeless(): this rank's entries whose expert has no home. All threads of a block call it.
template <typename Own, typename Received, typename Homeless>
__device__ inline void add_to_counters(const CounterTables& counters, const PlacementTables& placement, int num_experts,
                                       int num_local_experts, Own own, Received received, Homeless homeless) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto num_threads = static_cast<int>(blockDim.x);
  if (counters.homeless.data != nullptr && thread == 0) add_to_counter(counters.homeless, 0, homeless());
  if (counters.logical.data != nullptr || counters.physical.data != nullptr) {
    for (int expert = thread; expert < num_experts; expert += num_threads) {
      const std::int32_t count = own(expert);
      const int logical = placement.homes.logical_of == nullptr ? expert : placement.homes.logical_of[expert];
      if (counters.physical.data != nullptr) add_to_counter(counters.physical, expert, count);
      if (counters.logical.data != nullptr && logical >= 0) add_to_counter(counters.logical, logical, count);
    }
  }
  if (counters.received.data == nullptr) return;
  for (int local = thread; local < num_local_experts; local += num_threads) {
    add_to_counter(counters.received, local, received(local));
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_PLACEMENT_COUNTERS_CUH
