#ifndef FERRY_CUDA_LOCAL_TOKEN_LAYOUT_HPP
#define FERRY_CUDA_LOCAL_TOKEN_LAYOUT_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan/token_layout.hpp"

namespace ferry::cuda {

/// Number of blocks that count. A single block stores its counts; several add theirs to counts that a previous kernel
/// clears.
struct LayoutBlocks {
  std::int64_t num_blocks = 1;
  bool overlap = false;  ///< the blocks begin while that kernel runs; for GPUs that support this
                         ///< (LaunchShape::overlaps)
};
cudaError_t launch_layout(const plan::TokenLayoutParams& layout, const LayoutBlocks& blocks, cudaStream_t stream);
cudaError_t load_layout_kernels();
/// Whether this process has kernels compiled for GPUs that support overlap, decided by the current GPU of the first
/// call.
bool layout_can_overlap();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_TOKEN_LAYOUT_HPP
