#ifndef FERRY_CUDA_INTERNODE_COMBINE_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_COMBINE_PARAMS_HPP

/// Combine over several nodes, in three kernels. An exchange begins the call and carries the weights of a weighted sum.
/// Then every rank sums the rows that its node has for each token that it forwards and for each of its own. An exchange
/// returns these sums to the tokens' ranks, which add up the nodes as sums come in (token_sum.cuh). It may begin while
/// the second kernel makes sums, and sends those already made. Where a node's sum is a row as it is, as for a rank
/// alone in its node without weights, the last exchange is the whole call.

#include <cuda_runtime_api.h>

#include "cuda/call/routing_tables.hpp"
#include "cuda/call/tensors.hpp"
#include "cuda/internode/exchange_params.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

/// Parameters of the sums of this node's rows for each item.
struct NodeSumParams {
  RankParams ranks;
  RailParams rails;
  EntryMessage entry;  ///< offsets of this rank's rows, and of their weights
  const RouteSummary* gate = nullptr;
  const Destination* destinations = nullptr;  ///< [items, K], ranks numbered in the node
  const ItemFlow* to_nodes = nullptr;         ///< [nodes] flows of dispatch: positions of each node's items
  bool overlaps = false;                      ///< an exchange sends sums while others are made
  int num_topk = 0;
  bool one_row_per_token = true;  ///< kTokens
  bool float32 = false;
  bool weighted = false;
  bool returns_weights = false;
  const float* topk_weights = nullptr;  ///< [items, K]
  std::int64_t row_bytes = 0;
  std::byte* sums = nullptr;     ///< [items, row_bytes]
  float* sum_weights = nullptr;  ///< [items, K]
  int num_blocks = 1;
};

/// Warps in a block of launch_node_sums.
inline constexpr int kSumWarps = 8;

cudaError_t launch_node_sums(const NodeSumParams& params, cudaStream_t stream);
cudaError_t load_node_combine_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_COMBINE_PARAMS_HPP
