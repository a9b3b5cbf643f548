#ifndef FERRY_CUDA_INTERNODE_NODE_TABLES_HPP
#define FERRY_CUDA_INTERNODE_NODE_TABLES_HPP

/// The tables of a Routing over several nodes in device memory, and how they follow from what the hosts have found out.
///
/// *Items* are the tokens that one rank sends to one node. They are numbered twice: as they leave a rank, by the node
/// that they go to; and as they come to a rank for it to forward, by the node that they come from. Either order also
/// has the items that a rank sends to its own node.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/call/routing_tables.hpp"
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
    std::size_t num_items_back = 0;  ///< of them, those to other nodes, which combine returns
    std::size_t num_items_in = 0;
    std::size_t num_rows = 0;       ///< of outputs
    std::size_t num_used_rows = 0;  ///< at most num_rows
    bool by_token = true;           ///< kTokens
    bool weights = false;
  };

  RouteSummary* summary = nullptr;
  ItemFlow* to_nodes = nullptr;         ///< [nodes] of dispatch, and of the weights of combine
  ItemFlow* from_nodes = nullptr;       ///< [nodes] of the sums that combine returns
  std::int32_t* out_tokens = nullptr;   ///< [items out] token of each
  Destination* destinations = nullptr;  ///< [items in, K] in this node, ranks counted there
  /// [nodes, T] which of the items that come back, numbered by node; of the own node, incoming item; -1: none
  std::int32_t* item_of_token = nullptr;
  RowItem* row_items = nullptr;         ///< [used rows]
  std::int32_t* row_experts = nullptr;  ///< [used rows], not in kTokens
  std::int32_t* source = nullptr;       ///< [rows, 2]
  std::int32_t* slots = nullptr;        ///< [T, K]
  /// [T, K] ranks counted in the group. The last of the tables that kernels clear before they fill them, from
  /// `out_tokens` on.
  Destination* token_destinations = nullptr;
  std::int64_t* ids = nullptr;              ///< [T, K]
  std::int32_t* rows_per_expert = nullptr;  ///< [L]
  std::int64_t* row_offsets = nullptr;      ///< [L + 1]
  std::int64_t* expert_rows = nullptr;      ///< [E] rows of all ranks; not where kernels route in kTokens
  std::int32_t* own_counts = nullptr;       ///< [E] rows of this rank's tokens; only where hosts route
  // For tables by channel; token rows are counted for each rank from 0.
  std::int32_t* rank_base = nullptr;       ///< [R] zeros
  std::int32_t* source_base = nullptr;     ///< [R + 1] first row of each source, of kTokens
  std::int32_t* rank_counts = nullptr;     ///< [R, R]
  std::int64_t* tokens_of_rank = nullptr;  ///< [R]
  std::size_t host_bytes = 0;              ///< all of the above, which hosts fill in
  float* weights = nullptr;                ///< [T, K]
  std::size_t size_bytes = 0;

  static NodeTables at(std::byte* base, const Shape& shape);
};

/// This rank's experts, and where their rows are.
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
/// Fills `host_bytes` at `base`, in hosts' memory; the layout is that of device memory.
void fill(const NodeTablesInput& input, std::byte* base);

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_INTERNODE_NODE_TABLES_HPP
