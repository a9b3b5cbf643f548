#ifndef FERRY_CUDA_DRIVER_LAUNCH_HPP
#define FERRY_CUDA_DRIVER_LAUNCH_HPP

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ferry::cuda {

struct LaunchShape {
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  std::size_t shared_bytes = 0;
  /// The kernel may begin before the previous kernel on the stream has ended, and itself waits for that end
  /// (sync/kernel_order.cuh). For GPUs of compute capability 9.0 or more.
  bool overlaps = false;
  unsigned num_copy_blocks = 0;  ///< as KernelLaunch::num_copy_blocks; for observers
};

/// Reports the launch to the observer of launches, if there is one.
void note_launch(const LaunchShape& shape);

/// Launches `kernel`, a kernel's address, on the current device. `arguments`: addresses of its arguments, which the
/// launch copies. Returns the error of this launch, not one left by an earlier call.
cudaError_t launch_function(const void* kernel, const LaunchShape& shape, void** arguments, cudaStream_t stream);

/// Launches a kernel that takes one struct.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  void* arguments[] = {const_cast<Params*>(&params)};  // the launch copies the arguments and never writes them
  return launch_function(reinterpret_cast<const void*>(kernel), shape, static_cast<void**>(arguments), stream);
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_LAUNCH_HPP
