#ifndef FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
#define FERRY_CUDA_SYNC_KERNEL_ORDER_CUH

/// Replaces src/cuda/sync/kernel_order.cuh where kernels are emulated. A kernel that overlaps begins together with the
/// previous one, whether or not that one permits it, so that a kernel cannot rely on events for which it did not wait.

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline void let_next_kernel_begin() {}
inline void await_kernel_before() { emulator::await_grid_before(); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
