#ifndef FERRY_BALANCE_EXCHANGE_HPP
#define FERRY_BALANCE_EXCHANGE_HPP

/// Local search: relieves the busiest rank, one exchange at a time.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "balance/block.hpp"

namespace ferry::balancing {

struct ExchangeLimits {
  int max_steps = 0;
  double enough = 0;  ///< stop when the highest load is at most this
  /// Not null: a place of this placement is -1 where it is empty. Arrivals are counted against it.
  const Placement* previous = nullptr;
  std::size_t max_moves = std::numeric_limits<std::size_t>::max();
  double move_cost = 0;  ///< load by which the highest one must fall for each arrival
};

/// Experts that are on a rank in `placement` and were not in `previous`.
std::size_t count_moves(const Block& block, const Placement& previous, const Placement& placement);

/// A step either swaps two places of different ranks or gives a place of an expert with several replicas to another
/// expert. It is taken only if afterwards every rank it touched has less load than the busiest rank had, so no step
/// ever raises the highest load, and the search ends. Two replicas of an expert are never brought together on a rank.
/// Returns the best placement that was passed: lowest in load + move_cost * arrivals.
Placement improve(const Block& block, Placement start, const ExchangeLimits& limits);

/// A few random swaps between ranks or, with an odd `seed`, replicas that become others'; the busiest rank has a part
/// in the first. Brings no replicas of an expert together.
Placement kick(const Block& block, Placement placement, std::uint64_t seed);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_EXCHANGE_HPP
