#ifndef FERRY_CPU_CONTEXT_ROUTING_HPP
#define FERRY_CPU_CONTEXT_ROUTING_HPP

/// Tables of a Routing in host memory.

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "core/routing_state.hpp"
#include "cpu/context/spare_tables.hpp"
#include "plan/forward_table.hpp"
#include "plan/route_plan.hpp"

namespace ferry::cpu {

struct CpuRouting : RoutingState, LargeTables {
  explicit CpuRouting(std::shared_ptr<SpareTables> spares) : LargeTables(spares->take()), spare(std::move(spares)) {}
  CpuRouting(const CpuRouting&) = delete;
  CpuRouting& operator=(const CpuRouting&) = delete;
  ~CpuRouting() override { spare->give(std::move(static_cast<LargeTables&>(*this))); }

  std::shared_ptr<SpareTables> spare;
  std::int32_t num_used_rows_i32 = 0;

  std::vector<std::int64_t> num_rows_on_rank;    ///< [R] used rows of each rank
  std::vector<std::int64_t> num_tokens_of_rank;  ///< [R] T of each rank
  std::vector<std::int32_t> rank_counts;         ///< [R, R] tokens that each rank sends to each rank
  std::vector<std::int32_t> local_expert;        ///< [E] index among this rank's experts, -1 elsewhere
  std::vector<std::int64_t> expert_rows;         ///< [E] rows of each expert, from all ranks
  std::vector<std::int32_t> own_expert_counts;   ///< [E] rows of each expert, from this rank's tokens

  /// Destinations of a token.
  std::span<const plan::Destination> destinations_of(std::int64_t token) const {
    const auto begin = to_size(tokens.first_destination[to_size(token)]);
    const auto end = to_size(tokens.first_destination[to_size(token) + 1]);
    return {tokens.destinations.data() + begin, end - begin};
  }
  std::vector<std::int32_t> source_ranges_table;  ///< storage of source_ranges
  std::int64_t slab_capacity = 0;                 ///< C in latency mode
  /// Placement to whose counters the receive half of a split call adds. Null: no counts are due.
  std::shared_ptr<const ExpertPlacement> counted_placement;
  LoadCounters due_counters;
  std::int64_t num_homeless = 0;  ///< entries whose expert has no home, if the program counts them

  bool holds_token(std::int64_t row) const { return source_table[to_size(row) * 2] >= 0; }

  // Only in groups of several nodes.

  /// By node: this rank's tokens for that node. Those for its own node move without the network.
  std::vector<plan::ForwardTable> outgoing;
  /// By node: tokens of the rail peer there for this node, which this rank forwards. Empty for its own node.
  std::vector<plan::ForwardTable> incoming;
  /// [R] items that each rank sends to this node (ranks of this node: through memory).
  std::vector<std::int32_t> num_items_from_rank;
  /// [num_used_rows] item of each row's token in the source's table for this node; 0 in rows without a token.
  std::vector<std::int32_t> item_of_row;
};

/// Options of a route on which the rows depend.
plan::RouteShape route_shape(const RouteCall& call, const Topology& topology);

/// Copies the call's ids, converted to the homes that this rank's tokens pick, and its weights and sizes.
void copy_inputs(const RouteCall& call, int my_rank, CpuRouting& routing);
/// Same, with other homes than those of the call's placement.
void copy_inputs(const RouteCall& call, const plan::HomeTable& homes, int my_rank, CpuRouting& routing);

/// Plans the destinations of this rank's tokens, with ids `ids`, and its rows from the counts of all ranks. Leaves the
/// tokens of source_table unset.
void plan_rows(const plan::RouteShape& shape, plan::AllCounts sources, const plan::ExpertGroups& groups,
               std::size_t my_rank, std::span<const std::int64_t> ids, CpuRouting& routing);

/// Points the views at the tables, whose sizes are known.
void set_views(const RouteCall& call, CpuRouting& routing);

/// Fills in the experts and the views. Call it last. `own_counts` [E]: counts of this rank's tokens.
void finish(const RouteCall& call, const plan::RouteShape& shape, const plan::ExpertGroups& groups, std::size_t my_rank,
            const std::int32_t* own_counts, CpuRouting& routing);

/// Adds the counts of a finished route to a call's counters.
void add_to_counters(const LoadCounters& counters, const ExpertPlacement& placement, const CpuRouting& routing);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_ROUTING_HPP
