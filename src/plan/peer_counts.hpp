#ifndef FERRY_PLAN_PEER_COUNTS_HPP
#define FERRY_PLAN_PEER_COUNTS_HPP

/// Counts of one rank as sent over the network at route, and the check that they are possible. The tables sent later
/// are checked against them.

#include <cstddef>
#include <cstdint>

#include "ferry/group.hpp"
#include "ferry/status.hpp"
#include "plan/forward_table.hpp"
#include "plan/route_plan.hpp"

namespace ferry::plan {

struct PeerCounts {
  std::int32_t* rank_counts = nullptr;    ///< [R]
  std::int32_t* expert_counts = nullptr;  ///< [E]
  ForwardTableSize* tables = nullptr;     ///< [nodes]
  std::size_t wire_bytes = 0;             ///< a multiple of kRowGranuleBytes

  /// Pointers into `base`, which is aligned to kRowGranuleBytes; with a null base only the size.
  static PeerCounts at(std::byte* base, const Topology& topology, std::int64_t num_experts);
};

/// Checks that the counts are possible for `num_entries` = T * K entries, so that sums over them cannot overflow i32.
/// @errors kTransport; the message completes "rank 3 …"
Status check_counts(const PeerCounts& counts, const RouteShape& shape, const Topology& topology,
                    std::int64_t num_entries);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_PEER_COUNTS_HPP
