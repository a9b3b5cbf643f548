#ifndef FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
#define FERRY_CUDA_SYNC_KERNEL_ORDER_CUH

/// Order of a kernel that begins while the previous kernel on the stream is ending (LaunchShape::overlaps; CUDA
/// programming guide, "Programmatic Dependent Launch"). In other kernels both functions do nothing.

namespace ferry::cuda::device {

/// Lets the next kernel begin once every block has called this or ended. Publishes no data.
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the previous kernel has ended and all its writes are visible here.
__device__ inline void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
