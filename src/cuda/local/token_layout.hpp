#ifndef FERRY_CUDA_LOCAL_TOKEN_LAYOUT_HPP
#define FERRY_CUDA_LOCAL_TOKEN_LAYOUT_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan/token_layout.hpp"

namespace ferry::cuda {

/// How many blocks count. One stores its counts; more add theirs to counts that a kernel before them clears.
struct LayoutBlocks {
  std::int64_t num_blocks = 1;
  bool overlap = false;  ///< they begin beside that kernel; for GPUs that can (LaunchShape::overlaps)
};
cudaError_t launch_layout(const plan::TokenLayoutParams& layout, const LayoutBlocks& blocks, cudaStream_t stream);
cudaError_t load_layout_kernels();
/// Whether this process has the kernels for GPUs that can, by the first one that is asked about: the current one.
bool layout_can_overlap();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LOCAL_TOKEN_LAYOUT_HPP
