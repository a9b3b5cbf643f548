#ifndef FERRY_CUDA_SYNC_FLAGS_CUH
#define FERRY_CUDA_SYNC_FLAGS_CUH

/// Loads, stores and fences of flags under short names; ferry/device/memory_order.cuh has the instructions. System
/// scope reaches other GPUs over NVLink and the host; device scope the blocks of one kernel; block scope its warps.
/// Also here, because all kernels need it: a thread's position in its block.

#include <cstdint>

#include "ferry/device/memory_order.cuh"

namespace ferry::cuda::device {

using ferry::device::GpuMemory;

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;  ///< masks of a warp

__device__ inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_idx() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

__device__ inline std::uint64_t load_acquire_system(const std::uint64_t* address) {
  return GpuMemory::load_acquire_system(address);
}
/// For a word that publishes no other data: other loads need not wait for it.
__device__ inline std::uint64_t load_relaxed_system(const std::uint64_t* address) {
  return GpuMemory::load_relaxed_system(address);
}
__device__ inline void store_release_system(std::uint64_t* address, std::uint64_t value) {
  GpuMemory::store_release_system(address, value);
}
/// For a flag whose release is a `fence_system` before it.
__device__ inline void store_relaxed_system(std::uint64_t* address, std::uint64_t value) {
  GpuMemory::store_relaxed_system(address, value);
}
template <typename Word>
__device__ inline Word load_acquire_device(const Word* address) {
  return GpuMemory::load_acquire_device(address);
}
__device__ inline std::uint32_t load_relaxed_device(const std::uint32_t* address) {
  return GpuMemory::load_relaxed_device(address);
}
__device__ inline void store_release_device(std::uint32_t* address, std::uint32_t value) {
  GpuMemory::store_release_device(address, value);
}
__device__ inline void store_release_device(std::uint64_t* address, std::uint64_t value) {
  GpuMemory::store_release_device(address, value);
}

/// For a word in shared memory, between the warps of a block.
__device__ inline std::uint32_t load_acquire_block(const std::uint32_t* address) {
  return GpuMemory::load_acquire_block(address);
}
/// For a thread that polls, and fences once it has found its value: an acquire empties the first-level cache each time.
__device__ inline std::uint32_t load_relaxed_block(const std::uint32_t* address) {
  return GpuMemory::load_relaxed_block(address);
}
__device__ inline void store_release_block(std::uint32_t* address, std::uint32_t value) {
  GpuMemory::store_release_block(address, value);
}

/// Pauses between two polls of a word that many warps poll: their polls would delay data that arrives in the same part
/// of the second-level cache.
__device__ inline void pause() {
  constexpr unsigned kPauseNs = 400;
  __nanosleep(kPauseNs);
}

__device__ inline std::uint32_t add_acq_rel_device(std::uint32_t* address, std::uint32_t value) {
  return GpuMemory::add_acq_rel_device(address, value);
}
__device__ inline void add_release_device(std::uint32_t* address, std::uint32_t value) {
  GpuMemory::add_release_device(address, value);
}
__device__ inline std::uint64_t raise_device(std::uint64_t* address, std::uint64_t value) {
  return GpuMemory::max_device(address, value);
}
__device__ inline std::uint64_t add_relaxed_device(std::uint64_t* address, std::uint64_t value) {
  return GpuMemory::add_device(address, value);
}

__device__ inline void fence_system() { GpuMemory::fence_system(); }
/// For what threads of this GPU alone read.
__device__ inline void fence_device() { GpuMemory::fence_device(); }
__device__ inline void fence_async_proxy() { GpuMemory::fence_async_proxy(); }
__device__ inline std::uint64_t now_ns() { return GpuMemory::now_ns(); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_FLAGS_CUH
