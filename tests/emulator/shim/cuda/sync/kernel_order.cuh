#ifndef FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
#define FERRY_CUDA_SYNC_KERNEL_ORDER_CUH

/// In place of src/cuda/sync/kernel_order.cuh where kernels are emulated: those of a stream run one after the other.

namespace ferry::cuda::device {

inline void let_next_kernel_begin() {}
inline void await_kernel_before() {}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
