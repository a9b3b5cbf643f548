#ifndef FERRY_CUDA_LOCAL_SORT_NETWORK_CUH
#define FERRY_CUDA_LOCAL_SORT_NETWORK_CUH

/// Sorting of a few keys in a thread's registers: every index is a constant, so that none goes to memory.

#include <cstdint>
#include <utility>

#include "plan/host_device.hpp"

namespace ferry::cuda::device {

// Batcher's odd-even merge sort (Knuth, The Art of Computer Programming, volume 3, section 5.2.2, algorithm M).

struct SortSteps {
  static constexpr int kMax = 64;  ///< 16 keys take 63
  int low[kMax] = {};
  int high[kMax] = {};
  int count = 0;
};

FERRY_HOST_DEVICE constexpr SortSteps sort_steps(int size) {
  SortSteps steps;
  int highest = 1;
  while (2 * highest < size) highest *= 2;
  for (int p = highest; p > 0; p /= 2) {
    int q = highest;
    int r = 0;
    int d = p;
    while (true) {
      for (int i = 0; i < size - d; ++i) {
        if ((i & p) == r) {
          steps.low[steps.count] = i;
          steps.high[steps.count] = i + d;
          ++steps.count;
        }
      }
      if (q == p) break;
      d = q - p;
      q /= 2;
      r = p;
    }
  }
  return steps;
}

template <int kSize, int kLow, int kHigh>
__device__ void order_pair(std::uint32_t (&keys)[kSize]) {
  const std::uint32_t larger = max(keys[kLow], keys[kHigh]);
  keys[kHigh] = min(keys[kLow], keys[kHigh]);
  keys[kLow] = larger;
}

template <int kSize, int... kSteps>
__device__ void run_steps(std::uint32_t (&keys)[kSize], std::integer_sequence<int, kSteps...> /*steps*/) {
  constexpr SortSteps kNetwork = sort_steps(kSize);
  (order_pair<kSize, kNetwork.low[kSteps], kNetwork.high[kSteps]>(keys), ...);
}

template <int kSize>
__device__ void sort_descending(std::uint32_t (&keys)[kSize]) {
  if constexpr (kSize > 1) {
    constexpr int kCount = sort_steps(kSize).count;
    run_steps<kSize>(keys, std::make_integer_sequence<int, kCount>());
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_SORT_NETWORK_CUH
