#ifndef FERRY_CUDA_COPY_PREFETCH_CUH
#define FERRY_CUDA_COPY_PREFETCH_CUH

#include <cstddef>
#include <cstdint>

namespace ferry::cuda::device {

/// Prefetches the line at `global` into the second-level cache (PTX ISA, prefetch); no instruction waits for it.
__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

/// Starts to copy 4, 8 or 16 bytes from global to shared memory for the calling thread (PTX ISA, cp.async; sm_80).
template <std::size_t kBytes>
__device__ inline void start_fetch(void* shared, const void* global) {
  const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(kBytes) : "memory");
}

/// Arrives at `barrier` when the calling thread's fetches have landed. Waiting for the fetches themselves would also
/// wait for the thread's bulk stores.
__device__ inline void announce_fetches(std::uint64_t* barrier) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(barrier));
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address) : "memory");
}

/// Waits until the calling thread's fetches have landed.
__device__ inline void wait_fetches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_PREFETCH_CUH
