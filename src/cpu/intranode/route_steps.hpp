#ifndef FERRY_CPU_INTRANODE_ROUTE_STEPS_HPP
#define FERRY_CPU_INTRANODE_ROUTE_STEPS_HPP

/// Steps of a route on one node, without the waits between them: each rank publishes its counts, and its tokens by
/// destination, in its arena, and reads those of all ranks.

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"
#include "plan/route_tables.hpp"

namespace ferry::cpu::intranode {

/// Tables that one rank published.
struct RankTables {
  plan::RouteTables tables;
  plan::SourceCounts counts;
};

/// Tables of all ranks, by rank.
struct PeerTables {
  std::vector<plan::RouteTables> tables;
  std::vector<plan::SourceCounts> counts;

  void add(const RankTables& rank) {
    tables.push_back(rank.tables);
    counts.push_back(rank.counts);
  }
};

/// Writes this rank's tables and fills the descriptor's locations.
Status publish_tables(const RouteCall& call, const plan::RouteShape& shape, const CpuRouting& routing,
                      const Context& context, node::CallDescriptor& descriptor);

/// Tables at the locations in a rank's descriptor.
/// @errors kInternal: they are outside the rank's memory, or counts contradict each other
Result<RankTables> find_tables(const plan::RouteShape& shape, const node::Peers& peers, int rank,
                               const node::CallDescriptor& descriptor);

/// Fills the routing, which has copies of the inputs, from the tables of all ranks. `ids`: this rank's entries.
/// @errors kCapacity, the same on every rank
Status plan_from_tables(const RouteCall& call, const plan::RouteShape& shape, const PeerTables& peers,
                        std::size_t my_rank, std::span<const std::int64_t> ids, CpuRouting& routing);

}  // namespace ferry::cpu::intranode

#endif  // FERRY_CPU_INTRANODE_ROUTE_STEPS_HPP
