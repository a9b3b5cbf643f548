#ifndef FERRY_PLAN_REPLICAS_HPP
#define FERRY_PLAN_REPLICAS_HPP

/// Which home of an expert a token picks. Both hosts and GPUs look it up in a table that a rank makes of a placement:
/// for each logical expert the homes that its tokens choose from.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Which of a logical expert's homes a rank's tokens choose from: `count` entries of the list of homes.
struct HomeRange {
  std::uint32_t first;
  std::uint32_t count;
};
static_assert(sizeof(HomeRange) == 8, "one 8-byte load");

/// Index of the home that a token picks of `count`. Neither the entry's position in the token nor its weight plays a
/// part, so that a token that names an expert twice goes to one home. The rank does, so that ranks that have one token
/// each, as in decoding, do not all pick the first.
FERRY_HOST_DEVICE constexpr std::uint32_t pick_of(std::uint32_t count, std::int64_t token, int rank) {
  return (static_cast<std::uint32_t>(token) + static_cast<std::uint32_t>(rank)) % count;
}

/// What a rank's tokens choose from. Every logical expert has at least one home there.
struct HomeTable {
  std::vector<HomeRange> ranges{};  ///< [E]
  std::vector<std::int32_t> homes{};

  bool present() const { return !ranges.empty(); }
  std::int32_t pick(std::size_t logical, std::int64_t token, int rank) const {
    const HomeRange range = ranges[logical];
    return homes[range.first + (range.count == 1 ? 0 : pick_of(range.count, token, rank))];
  }
};

struct HomeTableParams {
  std::span<const std::int32_t> physical_to_logical{};  ///< [P], -1: none
  std::span<const std::int32_t> physical_to_rank{};     ///< [P]
  std::int64_t num_logical = 0;                         ///< E
  int rank = 0;                                         ///< whose tokens
  int ranks_per_node = 1;
  bool nearest = true;  ///< else all homes are alike
};
/// Every logical expert has a home.
HomeTable list_homes(const HomeTableParams& params);

/// What is left of a table of a group of one node when the homes on some ranks cannot be used. On one node a table has
/// homes of this rank or all there are, so those that are left are the nearest that are left. An expert that would have
/// none keeps all. `is_lost`: of each rank; never this one.
HomeTable without_lost_homes(const HomeTable& table, std::span<const std::int32_t> physical_to_rank,
                             const std::vector<bool>& is_lost);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_REPLICAS_HPP
