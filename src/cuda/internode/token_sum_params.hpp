#ifndef FERRY_CUDA_INTERNODE_TOKEN_SUM_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_TOKEN_SUM_PARAMS_HPP

#include <cstddef>
#include <cstdint>

#include "cuda/call/tensors.hpp"

namespace ferry::cuda {

/// Parameters of the sums over all nodes for each of this rank's tokens.
struct TokenSumParams {
  const std::int32_t* item_of_token = nullptr;  ///< [nodes, T] position in `own` or `returned`; -1: none
  int node = 0;
  int num_nodes = 1;
  std::int64_t num_tokens = 0;
  int num_topk = 0;
  bool one_row_per_token = true;
  bool float32 = false;
  bool returns_weights = false;
  std::int64_t row_bytes = 0;
  const std::byte* own = nullptr;  ///< sums of this rank's node
  std::int64_t own_stride = 0;
  const float* own_weights = nullptr;
  const std::byte* returned = nullptr;  ///< sums of other nodes
  const float* returned_weights = nullptr;
  const std::int64_t* ids = nullptr;    ///< [T, K]
  const std::int32_t* owner = nullptr;  ///< [E]
  int ranks_per_node = 1;
  BiasRows bias[2];
  std::byte* out_x = nullptr;
  std::int64_t out_stride = 0;
  float* out_weights = nullptr;  ///< [T, K]
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_TOKEN_SUM_PARAMS_HPP
