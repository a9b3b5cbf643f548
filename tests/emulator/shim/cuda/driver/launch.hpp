#ifndef FERRY_CUDA_DRIVER_LAUNCH_HPP
#define FERRY_CUDA_DRIVER_LAUNCH_HPP

/// Replaces src/cuda/driver/launch.hpp where kernels are emulated.

#include "emulator/emulator.hpp"

namespace ferry::cuda {

struct LaunchShape {
  unsigned num_blocks = 1;
  unsigned num_threads = 1;
  std::size_t shared_bytes = 0;
  bool overlaps = false;
  unsigned num_copy_blocks = 0;
};

void note_launch(const LaunchShape& shape);

template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), const LaunchShape& shape, const Params& params, cudaStream_t stream) {
  note_launch(shape);
  emulator::about_to_launch(reinterpret_cast<const void*>(kernel));
  emulator::launch_grid(stream, {shape.num_blocks, shape.num_threads, shape.shared_bytes, shape.overlaps},
                        [kernel, params] { kernel(params); });
  return cudaSuccess;
}

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_DRIVER_LAUNCH_HPP
