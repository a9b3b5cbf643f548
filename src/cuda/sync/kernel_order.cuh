#ifndef FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
#define FERRY_CUDA_SYNC_KERNEL_ORDER_CUH

/// A kernel that begins while the one before it on the stream is ending (LaunchShape::overlaps; CUDA programming guide,
/// "Programmatic Dependent Launch"). Elsewhere neither function does anything.

namespace ferry::cuda::device {

/// Lets the next kernel begin, once every block has called this or ended. Nothing is published by it.
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel before has ended, and all that it wrote is visible here.
__device__ inline void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_KERNEL_ORDER_CUH
