#ifndef FERRY_BALANCE_BLOCK_HPP
#define FERRY_BALANCE_BLOCK_HPP

/// Part of the ranks that is balanced by itself: one node, or all ranks.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ferry::balancing {

/// Expert ids are those of the block, 0 to load.size() - 1.
struct Block {
  std::size_t num_ranks = 1;
  std::size_t places_per_rank = 1;
  std::vector<double> load;  ///< load of each expert

  std::size_t num_places() const { return num_ranks * places_per_rank; }
};

/// [num_ranks * places_per_rank]: the expert in each place; rank r has places from r * places_per_rank on.
using Placement = std::vector<std::int32_t>;

/// Load of each rank.
std::vector<double> rank_loads(const Block& block, const Placement& placement);

/// Highest load of a rank.
double highest_load(const Block& block, const Placement& placement);

/// True if two replicas of an expert share a rank.
bool shares_ranks(const Block& block, const Placement& placement);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_BLOCK_HPP
