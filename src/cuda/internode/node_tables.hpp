#ifndef FERRY_CUDA_INTERNODE_NODE_TABLES_HPP
#define FERRY_CUDA_INTERNODE_NODE_TABLES_HPP

/// Tables of a Routing over several nodes in device memory, and how they are derived from the hosts' results.
///
/// *Items* are the tokens that one rank sends to one node. They are numbered twice: by destination node as they leave a
/// rank, and by source node as they arrive at the rank that forwards them. Both orders include the items that a rank
/// sends to its own node.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/internode/dispatch_params.hpp"
#include "cuda/internode/exchange_params.hpp"
#include "ferry/group.hpp"
#include "plan/node_route.hpp"

namespace ferry::cuda {

struct NodeTables {
  struct Shape {
    std::size_t num_ranks = 1;
    std::size_t num_nodes = 1;
    std::size_t num_tokens = 0;
    std::size_t num_topk = 0;
    std::size_t num_experts = 0;
    std::size_t num_local_experts = 0;
    std::size_t num_items_out = 0;
    std::size_t num_items_back = 0;  ///< items among these for other nodes, which combine returns
    std::size_t num_items_in = 0;
    std::size_t num_rows = 0;       ///< rows of outputs
    std::size_t num_used_rows = 0;  ///< at most num_rows
    bool by_token = true;           ///< kTokens
    bool weights = false;
  };

  RouteSummary* summary = nullptr;
  ItemFlow* to_nodes = nullptr;         ///< [nodes] flows of dispatch, and of the weights of combine
  ItemFlow* from_nodes = nullptr;       ///< [nodes] flows of the sums that combine returns
  std::int32_t* out_tokens = nullptr;   ///< [items out] token of each item
  Destination* destinations = nullptr;  ///< [items in, K] destinations in this node, ranks numbered there
  /// [nodes, T] number of the returned item, counted over all nodes; for this node, of the incoming item; -1: none
  std::int32_t* item_of_token = nullptr;
  RowItem* row_items = nullptr;         ///< [used rows]
  std::int32_t* row_experts = nullptr;  ///< [used rows], not in kTokens
  std::int32_t* source = nullptr;       ///< [rows, 2]
  std::int32_t* slots = nullptr;        ///< [T, K]
  /// [T, K] ranks numbered in the group. The last of the tables that kernels clear before they fill them; the first is
  /// `out_tokens`.
  Destination* token_destinations = nullptr;
  std::int64_t* ids = nullptr;              ///< [T, K]
  std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int64_t* row_offsets = nullptr;      ///< [L + 1]
  std::int64_t* expert_rows = nullptr;      ///< [E] rows of all ranks; not if kernels route in kTokens
  std::int32_t* own_counts = nullptr;       ///< [E] rows of this rank's tokens; only if hosts route
  // For tables by channel; each rank's token rows are numbered from 0.
  std::int32_t* rank_base = nullptr;       ///< [R] zeros
  std::int32_t* source_base = nullptr;     ///< [R + 1] first row of each source, in kTokens
  std::int32_t* rank_counts = nullptr;     ///< [R, R]
  std::int64_t* tokens_of_rank = nullptr;  ///< [R]
  std::size_t host_bytes = 0;              ///< bytes of all tables above, which hosts fill in
  float* weights = nullptr;                ///< [T, K]
  std::size_t size_bytes = 0;

  static NodeTables at(std::byte* base, const Shape& shape);
};

/// Experts of this rank, and the locations of their rows.
struct LocalExperts {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> num_rows;
  std::vector<std::int64_t> row_offsets;  ///< not in kTokens
};
LocalExperts local_experts(const plan::RouteShape& shape, const plan::NodeRoute& route, std::size_t rank);

struct NodeTablesInput {
  const Topology& topology;
  const plan::RouteShape& shape;
  const plan::NodeRoute& route;
  const LocalExperts& experts;
  const std::vector<std::int64_t>& ids;  ///< [T, K]
  std::int64_t num_rows = 0;             ///< of outputs
  bool weights = false;
};

NodeTables::Shape shape_of(const NodeTablesInput& input);
/// Fills `host_bytes` at `base`, in host memory; the layout is that of device memory.
void fill(const NodeTablesInput& input, std::byte* base);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_NODE_TABLES_HPP
