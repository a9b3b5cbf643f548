#ifndef FERRY_CUDA_DRIVER_LAUNCH_HPP
#define FERRY_CUDA_DRIVER_LAUNCH_HPP

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ferry::cuda {

struct LaunchShape {
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  std::size_t shared_bytes = 0;
};

/// For tests of what calls use: called with the shape of each launch from now on, by the thread that launches. Null,
/// the default, ends that. Captured launches count when they are captured.
using LaunchObserver = void (*)(const LaunchShape&);
void observe_launches(LaunchObserver observer);

/// Tells the observer, if there is one.
void note_launch(const LaunchShape& shape);

/// Launches a kernel that takes one struct. Returns the error of this launch, not one left behind by an earlier call.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  note_launch(shape);
  void* arguments[] = {const_cast<Params*>(&params)};  // copied by the launch, never written
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(shape.num_blocks), dim3(shape.num_threads),
                          static_cast<void**>(arguments), shape.shared_bytes, stream);
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_LAUNCH_HPP
