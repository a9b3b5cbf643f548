#ifndef FERRY_BALANCE_MATCHING_HPP
#define FERRY_BALANCE_MATCHING_HPP

/// New numbers for ranks, so that as much as possible stays where it was.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/block.hpp"

namespace ferry::balancing {

/// The column of each row, each column once, with the largest sum of values (the assignment problem).
/// @shape  values [n, n], row-major
std::vector<std::size_t> assign(const std::vector<std::int64_t>& values, std::size_t n);

/// Renumbers the parts of `placement` (each `part_places` consecutive places: a rank, or a node) so that most experts
/// are in the part in which they were.
Placement renumber_parts(const Placement& placement, const Placement& previous, std::size_t part_places);

/// Inside each rank, an expert that was there stays in its place; the others follow ascending in the free ones.
Placement keep_places(const Placement& placement, const Placement& previous, std::size_t places_per_rank);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_MATCHING_HPP
