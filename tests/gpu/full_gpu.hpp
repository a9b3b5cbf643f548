#ifndef FERRY_TESTS_GPU_FULL_GPU_HPP
#define FERRY_TESTS_GPU_FULL_GPU_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::test {

/// Launches one block for each multiprocessor of the current GPU, with so much shared memory that no other block that
/// uses any fits beside it. Each block waits until all have arrived, for a second at most. `words` [2], zeroed: blocks
/// that have arrived, and blocks that have seen all of them.
cudaError_t launch_full_gpu(std::uint32_t* words, cudaStream_t stream);

/// Number of blocks of a launch.
int full_gpu_blocks();

/// The same with `num_blocks` blocks, which wait until words[0] is at least `expected`.
cudaError_t launch_holders(std::uint32_t* words, int num_blocks, std::uint32_t expected, cudaStream_t stream);

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_FULL_GPU_HPP
