#ifndef FERRY_CUDA_SYNC_MEMORY_ORDER_CUH
#define FERRY_CUDA_SYNC_MEMORY_ORDER_CUH

/// Replaces src/cuda/sync/memory_order.cuh where kernels are emulated. Every load of a flag gives other threads a turn,
/// and every store of a flag may. One thread of the kernels runs at a time; host threads may run beside them.

#include <cstdint>

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;  ///< masks of a warp

inline int lane_idx() { return static_cast<int>(emulator::place().thread.x) % kWarpLanes; }
inline int warp_idx() { return static_cast<int>(emulator::place().thread.x) / kWarpLanes; }

template <typename Word>
Word polled_load(const Word* address) {
  emulator::poll();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <typename Word>
void flag_store(Word* address, Word value) {
  emulator::about_to_store();
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

inline std::uint64_t load_acquire_system(const std::uint64_t* address) { return polled_load(address); }
inline void store_release_system(std::uint64_t* address, std::uint64_t value) { flag_store(address, value); }
inline void store_relaxed_system(std::uint64_t* address, std::uint64_t value) { flag_store(address, value); }
inline std::uint64_t load_relaxed_system(const std::uint64_t* address) { return polled_load(address); }
inline std::uint32_t load_acquire_device(const std::uint32_t* address) { return polled_load(address); }
inline std::uint64_t load_acquire_device(const std::uint64_t* address) { return polled_load(address); }
inline std::uint32_t load_relaxed_device(const std::uint32_t* address) { return polled_load(address); }
inline void store_release_device(std::uint32_t* address, std::uint32_t value) { flag_store(address, value); }
inline void store_release_device(std::uint64_t* address, std::uint64_t value) { flag_store(address, value); }
inline std::uint32_t load_acquire_block(const std::uint32_t* address) { return polled_load(address); }
inline std::uint32_t load_relaxed_block(const std::uint32_t* address) { return polled_load(address); }
inline void store_release_block(std::uint32_t* address, std::uint32_t value) { flag_store(address, value); }
inline void pause() {}
inline std::uint32_t add_acq_rel_device(std::uint32_t* address, std::uint32_t value) {
  emulator::about_to_store();
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline void add_release_device(std::uint32_t* address, std::uint32_t value) { add_acq_rel_device(address, value); }
inline std::uint64_t raise_device(std::uint64_t* address, std::uint64_t value) {
  emulator::about_to_store();
  const std::uint64_t before = *address;
  *address = before < value ? value : before;
  return before;
}
inline std::uint64_t add_relaxed_device(std::uint64_t* address, std::uint64_t value) {
  emulator::about_to_store();
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline void fence_system() {}
inline void fence_async_proxy() {}
inline std::uint64_t now_ns() { return emulator::now_ns(); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_MEMORY_ORDER_CUH
