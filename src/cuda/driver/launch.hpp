#ifndef FERRY_CUDA_DRIVER_LAUNCH_HPP
#define FERRY_CUDA_DRIVER_LAUNCH_HPP

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ferry::cuda {

struct LaunchShape {
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  std::size_t shared_bytes = 0;
  /// The kernel may begin before the one before it on the stream has ended, and waits for that itself
  /// (sync/kernel_order.cuh). For GPUs of compute capability 9.0 or more.
  bool overlaps = false;
  unsigned num_copy_blocks = 0;  ///< as KernelLaunch::num_copy_blocks; for observers
};

/// Tells the observer of launches, if there is one.
void note_launch(const LaunchShape& shape);

/// Launches `kernel`, the address of one, on the current device. `arguments`: the addresses of its own, copied at once.
/// The error is that of this launch, not one left behind by an earlier call.
cudaError_t launch_function(const void* kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream);

/// Launches a kernel that takes one struct.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};  // copied by the launch, never written
  return launch_function(reinterpret_cast<const void*>(kernel), shape, static_cast<void**>(arguments), stream);
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_LAUNCH_HPP
