#ifndef FERRY_BALANCE_GREEDY_HPP
#define FERRY_BALANCE_GREEDY_HPP

/// Start placements for the exchange: replicas by load, then the heaviest replica first, to the lightest rank.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "balance/block.hpp"

namespace ferry::balancing {

enum class EqualLoads {
  kLowerId = 0,        ///< among experts with equal load per replica, the lower id gets the next replica
  kFewerReplicas = 1,  ///< the expert with fewer replicas gets it
};

/// Number of replicas of each expert, `num_places` in all, at most `max_count` of each, such that the heaviest replica
/// is as light as possible. (Each step relieves the heaviest replica; no other way to relieve it exists.)
/// @pre load.size() <= num_places <= load.size() * max_count
std::vector<std::size_t> count_replicas(const std::vector<double>& load, std::size_t num_places, std::size_t max_count,
                                        EqualLoads equal);

/// Lower bound on the highest load of any placement of the block: the mean of the ranks, or the heaviest replica if
/// counts are chosen to make it as light as possible.
double load_bound(const Block& block);

/// Bin of each item: heaviest item first (ties: lower index), to the lightest bin with room (ties: lower index).
/// @pre weights.size() == num_bins * items_per_bin
std::vector<std::size_t> pack(const std::vector<double>& weights, std::size_t num_bins, std::size_t items_per_bin);

/// Greedy algorithm: count_replicas without a limit, then pack.
Placement place_greedily(const Block& block);

/// Greedy algorithm with no two replicas of an expert on one rank.
/// @pre block.num_places() <= block.load.size() * block.num_ranks
Placement place_apart(const Block& block);

/// Gives each empty place (-1) the expert with most load per replica (ties: lower id) that its rank does not have, or
/// expert 0 if it has them all.
/// @pre every expert has a place
Placement fill_empty(const Block& block, Placement placement);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_GREEDY_HPP
