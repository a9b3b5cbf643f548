#ifndef FERRY_PLAN_REPLICAS_HPP
#define FERRY_PLAN_REPLICAS_HPP

/// Choice of an expert's home for a token. Hosts and GPUs look it up in a table that a rank derives from a placement:
/// for each logical expert, the homes from which its tokens choose.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Homes of a logical expert from which a rank's tokens choose: `count` entries of the list of homes; 0: the expert has
/// no home.
struct HomeRange {
  std::uint32_t first;
  std::uint32_t count;
};
static_assert(sizeof(HomeRange) == 8, "one 8-byte load");

/// Index of a token's pick among `count` homes, at least one. It does not depend on the entry's position in the token,
/// nor on its weight, so that a token that names an expert twice goes to one home. It depends on the rank, so that
/// ranks with one token each, as in decoding, do not all pick the first home.
FERRY_HOST_DEVICE constexpr std::uint32_t pick_of(std::uint32_t count, std::int64_t token, int rank) {
  return (static_cast<std::uint32_t>(token) + static_cast<std::uint32_t>(rank)) % count;
}

/// Homes from which a rank's tokens choose.
struct HomeTable {
  std::vector<HomeRange> ranges{};  ///< [E]
  std::vector<std::int32_t> homes{};

  bool present() const { return !ranges.empty(); }
  /// Physical expert that a token picks; -1: the expert has no home.
  std::int32_t pick(std::size_t logical, std::int64_t token, int rank) const {
    const HomeRange range = ranges[logical];
    if (range.count == 0) return -1;
    return homes[range.first + (range.count == 1 ? 0 : pick_of(range.count, token, rank))];
  }
};

struct HomeTableParams {
  std::span<const std::int32_t> physical_to_logical{};  ///< [P], -1: none
  std::span<const std::int32_t> physical_to_rank{};     ///< [P]
  std::int64_t num_logical = 0;                         ///< E
  int rank = 0;                                         ///< rank whose tokens choose
  int ranks_per_node = 1;
  bool nearest = true;  ///< else all homes count as equally near
};
/// Lists the homes.
HomeTable list_homes(const HomeTableParams& params);

/// Remainder of a table of a group of one node when the homes on some ranks cannot be used. On one node a table lists
/// either the homes of this rank or all homes, so the remainder is the nearest of the remaining homes. An expert that
/// would lose all homes keeps them. `is_lost`: by rank; never this rank.
HomeTable without_lost_homes(const HomeTable& table, std::span<const std::int32_t> physical_to_rank,
                             const std::vector<bool>& is_lost);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_REPLICAS_HPP
