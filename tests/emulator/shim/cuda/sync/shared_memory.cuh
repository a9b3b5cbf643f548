#ifndef FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
#define FERRY_CUDA_SYNC_SHARED_MEMORY_CUH

/// In place of src/cuda/sync/shared_memory.cuh where kernels are emulated.

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline std::byte* dynamic_shared() { return emulator::dynamic_shared(); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_SHARED_MEMORY_CUH
