#ifndef FERRY_CUDA_CALL_PADDING_HPP
#define FERRY_CUDA_CALL_PADDING_HPP

/// The kernel that follows a dispatch whose outputs have rows without a token.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/call/tensors.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

struct PaddingParams {
  RankParams ranks;
  const RouteSummary* summary = nullptr;
  const std::int32_t* source = nullptr;  ///< [rows, 2]
  std::int64_t num_rows = 0;
  std::int32_t* out_source = nullptr;
  DispatchOutputs out;
  std::int64_t row_bytes = 0;
  int num_topk = 0;
  int weights_per_row = 0;
  bool zero = false;
  bool clears_refused = false;  ///< DispatchOptions::clear_if_refused
  int max_blocks = 1;
};

/// Fills rows that hold no token, and the source table. Called after launch_dispatch.
cudaError_t launch_padding(const PaddingParams& params, cudaStream_t stream);
cudaError_t load_padding_kernel();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_CALL_PADDING_HPP
