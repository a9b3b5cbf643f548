#ifndef FERRY_TOOLS_DEVICE_LAUNCH_HPP
#define FERRY_TOOLS_DEVICE_LAUNCH_HPP

/// Launches the command's own kernels. Tests replace this file and run them without a GPU.

#include <cuda_runtime_api.h>

#include "device/launch_shape.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

/// Launches a kernel that takes one struct. Returns the error of this launch, not one left by an earlier call.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), const LaunchShape& shape, const Params& params, Stream stream) {
  void* arguments[] = {const_cast<Params*>(&params)};  // the launch copies it and never writes it
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(shape.num_blocks), dim3(shape.num_threads),
                          static_cast<void**>(arguments), shape.shared_bytes, static_cast<cudaStream_t>(stream.handle));
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_LAUNCH_HPP
