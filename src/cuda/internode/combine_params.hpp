#ifndef FERRY_CUDA_INTERNODE_COMBINE_PARAMS_HPP
#define FERRY_CUDA_INTERNODE_COMBINE_PARAMS_HPP

/// Combine over several nodes: an exchange begins the call and brings the weights of a weighted sum; then every rank
/// sums, for each token that it forwards and each of its own, the rows that its node has; an exchange takes those sums
/// back to the tokens' ranks; and those sum the nodes. Four kernels, of which the third may begin while the second
/// makes sums, and sends what there is of them.

#include <cuda_runtime_api.h>

#include <array>

#include "cuda/call/routing_tables.hpp"
#include "cuda/call/tensors.hpp"
#include "cuda/internode/exchange_params.hpp"
#include "cuda/sync/rail_params.hpp"
#include "cuda/sync/rank_params.hpp"

namespace ferry::cuda {

/// The rows that this rank's node has for each item, summed.
struct NodeSumParams {
  RankParams ranks;
  RailParams rails;
  EntryMessage entry;  ///< offsets of the rows that this rank gives, and of their weights
  const RouteSummary* gate = nullptr;
  const Destination* destinations = nullptr;  ///< [items, K], ranks counted in the node
  const ItemFlow* to_nodes = nullptr;         ///< [nodes] of dispatch: where items from each node are
  bool overlaps = false;                      ///< an exchange sends sums as they are made
  int num_topk = 0;
  bool one_row_per_token = true;  ///< kTokens
  bool float32 = false;
  bool weighted = false;
  bool rank_sums = false;  ///< CombineOrder::kRankSums; weighted, and no weights are returned
  bool returns_weights = false;
  const float* topk_weights = nullptr;  ///< [items, K]
  std::int64_t row_bytes = 0;
  std::byte* sums = nullptr;       ///< [items, row_bytes]
  float* sum_weights = nullptr;    ///< [items, K]
  std::byte* rank_rows = nullptr;  ///< with rank_sums: room for sums of ranks, num_rank_rows rows for each warp
  int num_rank_rows = 0;
  int num_blocks = 1;
};

/// What all nodes have for each of this rank's tokens, summed.
struct TokenSumParams {
  const RouteSummary* gate = nullptr;
  const std::uint32_t* broken = nullptr;        ///< LocalState::broken
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
  const float* own_weights = nullptr;
  const std::byte* returned = nullptr;  ///< of other nodes
  const float* returned_weights = nullptr;
  const std::int64_t* ids = nullptr;    ///< [T, K]
  const std::int32_t* owner = nullptr;  ///< [E]
  int ranks_per_node = 1;
  BiasRows bias[2];
  std::byte* out_x = nullptr;
  std::int64_t out_stride = 0;
  float* out_weights = nullptr;  ///< [T, K]
  int num_blocks = 1;
};

/// Warps of a block of launch_node_sums.
inline constexpr int kSumWarps = 8;

cudaError_t launch_node_sums(const NodeSumParams& params, cudaStream_t stream);
cudaError_t launch_token_sums(const TokenSumParams& params, cudaStream_t stream);
cudaError_t load_node_combine_kernels();

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_COMBINE_PARAMS_HPP
