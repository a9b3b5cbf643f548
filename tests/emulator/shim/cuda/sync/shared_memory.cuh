#ifndef FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
#define FERRY_CUDA_SYNC_SHARED_MEMORY_CUH

/// Replaces src/cuda/sync/shared_memory.cuh where kernels are emulated.

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline constexpr int kSharedAlignment = 128;

inline std::byte* dynamic_shared() { return emulator::dynamic_shared(); }

template <typename T>
T& static_shared() {
  static const char type = 0;  // its address identifies the type
  return *reinterpret_cast<T*>(emulator::static_shared(&type, sizeof(T)));
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
