#ifndef FERRY_BALANCE_MATCHING_HPP
#define FERRY_BALANCE_MATCHING_HPP

/// Renumbering of ranks, so that as many experts as possible stay in place.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/block.hpp"

namespace ferry::balancing {

/// Column of each row, each column once, with the largest sum of values (the assignment problem).
/// @shape  values [n, n], row-major
std::vector<std::size_t> assign(const std::vector<std::int64_t>& values, std::size_t n);

/// Renumbers the parts of `placement` (each `part_places` consecutive places: a rank, or a node) so that most experts
/// stay in their previous part.
Placement renumber_parts(const Placement& placement, const Placement& previous, std::size_t part_places);

/// Orders each rank's places: an expert that was there before keeps its place; the others fill the free places in
/// ascending order.
Placement keep_places(const Placement& placement, const Placement& previous, std::size_t places_per_rank);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_MATCHING_HPP
