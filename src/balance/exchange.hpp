#ifndef FERRY_BALANCE_EXCHANGE_HPP
#define FERRY_BALANCE_EXCHANGE_HPP

/// Local search that relieves the busiest rank, one exchange at a time.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "balance/block.hpp"

namespace ferry::balancing {

struct ExchangeLimits {
  int max_steps = 0;
  double enough = 0;  ///< stop when the highest load is at most this
  /// Not null: arrivals are counted against this placement, which has -1 in empty places.
  const Placement* previous = nullptr;
  std::size_t max_moves = std::numeric_limits<std::size_t>::max();
  double move_cost = 0;  ///< fall of the highest load that pays for one arrival
};

/// Number of pairs of an expert and a rank that `placement` has and `previous` does not.
std::size_t count_moves(const Block& block, const Placement& previous, const Placement& placement);

/// Improves `start` step by step. A step either swaps two places of different ranks or gives a place of an expert with
/// several replicas to another expert. It is taken only if afterwards every rank that it changed has less load than the
/// busiest rank had, so no step ever raises the highest load, and the search ends. Two replicas of an expert are never
/// brought together on a rank. Returns the best placement on the way: lowest in load + move_cost * arrivals.
Placement improve(const Block& block, Placement start, const ExchangeLimits& limits);

/// Perturbs a placement: a few random swaps between ranks or, with an odd `seed`, replicas replaced by other experts;
/// the first change involves the busiest rank. Brings no replicas of an expert together.
Placement kick(const Block& block, Placement placement, std::uint64_t seed);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_EXCHANGE_HPP
