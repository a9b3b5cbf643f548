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

/// Launches a kernel that takes one struct. Returns the error of this launch, not one left behind by an earlier call.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  note_launch(shape);
  void* arguments[] = {const_cast<Params*>(&params)};  // copied by the launch, never written
  const auto* const function = reinterpret_cast<const void*>(kernel);
  if (!shape.overlaps) {
    return cudaLaunchKernel(function, dim3(shape.num_blocks), dim3(shape.num_threads), static_cast<void**>(arguments),
                            shape.shared_bytes, stream);
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.num_blocks);
  config.blockDim = dim3(shape.num_threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, function, static_cast<void**>(arguments));
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_LAUNCH_HPP
