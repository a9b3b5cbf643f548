#ifndef FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
#define FERRY_CUDA_SYNC_KERNEL_ORDER_CUH

/// In place of src/cuda/sync/kernel_order.cuh where kernels are emulated: a kernel that overlaps begins with the one
/// before, whether or not that lets it, so that nothing is taken to have happened before that was not waited for.

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline void let_next_kernel_begin() {}
inline void await_kernel_before() { emulator::await_grid_before(); }

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
