#ifndef FERRY_PLAN_NODE_ROUTE_HPP
#define FERRY_PLAN_NODE_ROUTE_HPP

/// Result of a route for a rank of a group of several nodes.

#include <cstdint>
#include <vector>

#include "plan/forward_table.hpp"
#include "plan/route_plan.hpp"

namespace ferry::plan {

struct NodeRoute {
  TokenPlan tokens;                              ///< destinations of this rank's entries
  ExpertGroups groups;                           ///< groups of all experts
  std::vector<std::int32_t> own_expert_counts;   ///< [E] counts of this rank's tokens
  std::vector<std::int64_t> num_rows_on_rank;    ///< [R] used rows of each rank
  std::vector<std::int64_t> num_tokens_of_rank;  ///< [R] T of each rank
  std::vector<std::int64_t> num_rows_from_rank;  ///< [R]
  std::vector<std::int32_t> rank_counts;         ///< [R, R] tokens from each rank to each rank
  std::int64_t num_used_rows = 0;
  std::vector<std::int32_t> source_table;  ///< [num_used_rows, 2] source rank and token, -1 in rows without a token
  /// By node: this rank's tokens that go there. Those for its own node do not use the network.
  std::vector<ForwardTable> outgoing;
  /// By node: tokens of the rail peer there that this rank forwards in its own node. Empty for its own node.
  std::vector<ForwardTable> incoming;
  /// [R] items that each rank sends to this node (its own ranks: through memory).
  std::vector<std::int32_t> num_items_from_rank;
  /// [num_used_rows] item of each row's token in its source's table for this node; 0 in rows without a token.
  std::vector<std::int32_t> item_of_row;
};

/// Plans `my_rank`'s tokens and rows from the counts of all ranks, up to rank_counts and source_table, which has no
/// tokens yet. Reuses the memory of `route`.
inline void plan_rows(const RouteShape& shape, AllCounts sources, std::size_t my_rank,
                      std::span<const std::int64_t> ids, NodeRoute& route) {
  route.tokens = place_tokens(shape, sources, route.groups, my_rank, ids, std::move(route.tokens));
  for (std::size_t rank = 0; rank < shape.num_ranks; ++rank) {
    route.num_tokens_of_rank.push_back(sources[rank].num_entries / static_cast<std::int64_t>(shape.num_topk));
    route.rank_counts.insert(route.rank_counts.end(), sources[rank].rank_counts,
                             sources[rank].rank_counts + shape.num_ranks);
    route.num_rows_on_rank.push_back(rows_on_rank(shape, sources, route.groups, rank));
    route.num_rows_from_rank.push_back(rows_from_source(shape, sources[rank], my_rank));
  }
  const std::int32_t* const own_counts = sources[my_rank].expert_counts;
  route.own_expert_counts.assign(own_counts, own_counts + shape.num_experts);
  route.num_used_rows = route.num_rows_on_rank[my_rank];
  route.source_table.assign(to_size(route.num_used_rows) * 2, -1);
}

}  // namespace ferry::plan

#endif  // FERRY_PLAN_NODE_ROUTE_HPP
