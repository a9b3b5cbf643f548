#ifndef FERRY_TESTS_GPU_FULL_GPU_HPP
#define FERRY_TESTS_GPU_FULL_GPU_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::test {

/// A block for each multiprocessor of the current GPU, with so much shared memory that nothing else that uses any fits
/// beside it. Each waits until all are there, for a second at most. `words` [2], zeroed: blocks that have come, and
/// blocks that have seen all of them.
cudaError_t launch_full_gpu(std::uint32_t* words, cudaStream_t stream);

/// Blocks of a launch.
int full_gpu_blocks();

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_FULL_GPU_HPP
