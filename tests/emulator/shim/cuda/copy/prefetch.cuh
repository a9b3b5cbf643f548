#ifndef FERRY_CUDA_COPY_PREFETCH_CUH
#define FERRY_CUDA_COPY_PREFETCH_CUH

/// Replaces src/cuda/copy/prefetch.cuh where kernels are emulated. A fetch copies when its thread waits for it, so data
/// used too early is missing.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "cuda/copy/bulk_copy.cuh"
#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline void prefetch_l2(const void* /*global*/) {}

struct EmulatedFetch {
  void* to;
  const void* from;
  std::size_t bytes;
};
/// Fetches that have not been made, by thread.
inline std::map<const void*, std::vector<EmulatedFetch>> late_fetches;

template <std::size_t kBytes>
void start_fetch(void* shared, const void* global) {
  late_fetches[&emulator::place()].push_back({shared, global, kBytes});
}
inline void wait_fetches() {
  const auto late = late_fetches.extract(&emulator::place());
  if (late.empty()) return;
  for (const EmulatedFetch& fetch : late.mapped()) std::memcpy(fetch.to, fetch.from, fetch.bytes);
}
/// Counts as an arrival at the barrier after this thread's fetches are made.
inline void announce_fetches(std::uint64_t* barrier) {
  wait_fetches();
  expect_loads(barrier, 0);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_PREFETCH_CUH
