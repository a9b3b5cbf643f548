#ifndef FERRY_CUDA_INTRANODE_TOKEN_LAYOUT_HPP
#define FERRY_CUDA_INTRANODE_TOKEN_LAYOUT_HPP

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ferry/status.hpp"
#include "ferry/types.hpp"
#include "plan/token_layout.hpp"

namespace ferry::cuda {

/// Counts on `device` (-1: the current one), in stream order; all pointers are memory of that GPU.
Status count_layout(const plan::TokenLayoutParams& params, int device, Stream stream);

/// With one block the counts are stored, with more they are cleared first and added up.
cudaError_t launch_layout(const plan::TokenLayoutParams& layout, std::int64_t num_blocks, cudaStream_t stream);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTRANODE_TOKEN_LAYOUT_HPP
