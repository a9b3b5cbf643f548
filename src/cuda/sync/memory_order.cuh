#ifndef FERRY_CUDA_SYNC_MEMORY_ORDER_CUH
#define FERRY_CUDA_SYNC_MEMORY_ORDER_CUH

/// Loads, stores and fences for flags, each one PTX instruction (PTX ISA, "Memory Consistency Model"). System scope
/// includes other GPUs, over NVLink, and the host; device scope includes the blocks of one kernel. The bulk copy
/// engine, which also moves rows, is another proxy: `fence_async_proxy` orders its accesses with ordinary ones (PTX
/// ISA, "membar / fence", fence.proxy.async). The header also has a thread's position in its block, which all device
/// code needs.

#include <cstdint>

namespace ferry::cuda::device {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;  ///< masks of a warp

__device__ inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_idx() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

__device__ inline std::uint64_t load_acquire_system(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

/// Loads a word that publishes only itself; other loads need not wait for it.
__device__ inline std::uint64_t load_relaxed_system(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// Stores a flag whose release is an earlier `fence_system`.
__device__ inline void store_relaxed_system(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline std::uint32_t load_acquire_device(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline std::uint64_t load_acquire_device(const std::uint64_t* address) {
  std::uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline std::uint32_t load_relaxed_device(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release_device(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline void store_release_device(std::uint64_t* address, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// Loads a word in shared memory that another warp of the block wrote.
__device__ inline std::uint32_t load_acquire_block(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
/// Variant for a warp that polls and fences once it has found the awaited value: each acquire would empty the
/// first-level cache.
__device__ inline std::uint32_t load_relaxed_block(const std::uint32_t* address) {
  std::uint32_t value;
  asm volatile("ld.relaxed.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ inline void store_release_block(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// Pauses between two polls of a word that many warps poll: their polls would delay data that arrives in the same part
/// of the second-level cache.
__device__ inline void pause() {
  constexpr unsigned kPauseNs = 400;
  __nanosleep(kPauseNs);
}

/// Adds and returns the previous value. Everything visible to this thread is visible to a thread that sees the sum.
__device__ inline std::uint32_t add_acq_rel_device(std::uint32_t* address, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}

/// Variant for a thread that does not need the sum.
__device__ inline void add_release_device(std::uint32_t* address, std::uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

/// Raises a word, or adds to it, and returns the previous value. Orders no other access. Written in PTX because the
/// compiler would sum the lanes' operands first.
__device__ inline std::uint64_t raise_device(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t before;
  asm volatile("atom.max.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
  return before;
}
__device__ inline std::uint64_t add_relaxed_device(std::uint64_t* address, std::uint64_t value) {
  std::uint64_t before;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(address), "l"(value) : "memory");
  return before;
}

__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

/// Orders ordinary accesses to global memory with those of the bulk copy engine, in both directions.
__device__ inline void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

/// Nanoseconds of a clock that all multiprocessors share (PTX ISA, %globaltimer). Coarse: use for deadlines only.
__device__ inline std::uint64_t now_ns() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value)::"memory");
  return value;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_MEMORY_ORDER_CUH
