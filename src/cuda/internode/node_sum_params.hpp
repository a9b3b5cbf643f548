#ifndef FERRY_CUDA_INTERNODE_NODE_SUM_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_NODE_SUM_PARAMS_HPP

#include <cstddef>
#include <cstdint>

#include "cuda/call/routing_tables.hpp"

namespace ferry::cuda {

struct ItemFlow;

/// Parameters of the sums of this node's rows for each item.
struct NodeSumParams {
  const Destination* destinations = nullptr;  ///< [items, K], ranks numbered in the node
  const ItemFlow* to_nodes = nullptr;         ///< [nodes] flows of dispatch: positions of each node's items
  int num_topk = 0;
  bool one_row_per_token = true;  ///< kTokens
  bool weighted = false;
  bool returns_weights = false;
  const float* topk_weights = nullptr;  ///< [items, K]
  std::int64_t row_bytes = 0;
  std::byte* sums = nullptr;     ///< [items, row_bytes]
  float* sum_weights = nullptr;  ///< [items, K]
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_NODE_SUM_PARAMS_HPP
