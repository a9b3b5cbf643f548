#ifndef FERRY_BALANCE_MATCHING_HPP
#define FERRY_BALANCE_MATCHING_HPP

/// Renumbering of ranks, so that as many experts as possible stay in place.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/block.hpp"
#include "balance/interruption.hpp"

namespace ferry::balancing {

struct Renumbering {
  std::size_t part_places = 1;  ///< consecutive places of a part: a rank, or a node
  /// May be null. After an interruption the numbers stay as they are.
  Interruption* interruption = nullptr;
};

/// Renumbers the parts of `placement` so that most experts stay in their previous part.
Placement renumber_parts(const Placement& placement, const Placement& previous, const Renumbering& how);

/// Orders each rank's places: an expert that was there before keeps its place; the others fill the free places in
/// ascending order.
Placement keep_places(const Placement& placement, const Placement& previous, std::size_t places_per_rank);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_MATCHING_HPP
