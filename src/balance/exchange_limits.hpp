#ifndef FERRY_BALANCE_EXCHANGE_LIMITS_HPP
#define FERRY_BALANCE_EXCHANGE_LIMITS_HPP

/// Limits of the search in exchange.hpp.

#include <cstddef>
#include <limits>

#include "balance/block.hpp"
#include "balance/interruption.hpp"

namespace ferry::balancing {

struct ExchangeLimits {
  int max_steps = 0;
  double enough = 0;  ///< stop when the highest load is at most this
  /// Searches that start again from the best placement, changed at random, while its highest load is above `good`.
  int num_kicks = 0;
  double good = 0;
  /// Not null: arrivals are counted against this placement, which has -1 in empty places. Without kicks.
  const Placement* previous = nullptr;
  std::size_t max_moves = std::numeric_limits<std::size_t>::max();
  double move_cost = 0;  ///< fall of the highest load that pays for one arrival
  /// Ends the search early, with a placement of no use but to be dropped.
  Interruption* interruption = nullptr;
};

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_EXCHANGE_LIMITS_HPP
