#ifndef FERRY_CPU_INTRANODE_ROUTE_STEPS_HPP
#define FERRY_CPU_INTRANODE_ROUTE_STEPS_HPP

/// Steps of a route on one node, without the waits between them: each rank publishes its counts, and its tokens by
/// destination, in its arena, and reads those of all ranks.

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/context/context.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/intranode/participants.hpp"
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

// The same steps among the ranks that this one does not mask.

/// copy_inputs(), except that tokens pick among the homes that remain when the call begins.
void copy_inputs_among(const RouteCall& call, const node::Peers& peers, const Participants& ranks, CpuRouting& routing);

/// find_tables() and plan_from_tables(). A masked rank has no tokens and receives none, but the rows that it would have
/// received count against the capacity of its experts. Counts are copied, so that they stay as they were checked.
/// @errors kInternal, kCapacity
Status plan_among(const RouteCall& call, const plan::RouteShape& shape, const node::Peers& peers, Participants& ranks,
                  CpuRouting& routing);

}  // namespace ferry::cpu::intranode

#endif  // FERRY_CPU_INTRANODE_ROUTE_STEPS_HPP
