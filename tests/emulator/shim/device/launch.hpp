#ifndef FERRY_TOOLS_DEVICE_LAUNCH_HPP
#define FERRY_TOOLS_DEVICE_LAUNCH_HPP

/// Replaces tools/device/launch.hpp where kernels are emulated.

#include "device/launch_shape.hpp"
#include "emulator/emulator.hpp"
#include "ferry/types.hpp"

namespace ferry::tools {

template <typename Params>
cudaError_t launch(void (*kernel)(Params), const LaunchShape& shape, const Params& params, Stream stream) {
  emulator::about_to_launch(reinterpret_cast<const void*>(kernel));
  emulator::launch_grid(static_cast<cudaStream_t>(stream.handle),
                        {shape.num_blocks, shape.num_threads, shape.shared_bytes, false},
                        [kernel, params] { kernel(params); });
  return cudaSuccess;
}

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEVICE_LAUNCH_HPP
