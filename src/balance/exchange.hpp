#ifndef FERRY_BALANCE_EXCHANGE_HPP
#define FERRY_BALANCE_EXCHANGE_HPP

/// Local search that relieves the busiest rank, one exchange at a time.

#include <cstddef>

#include "balance/block.hpp"
#include "balance/exchange_limits.hpp"

namespace ferry::balancing {

/// Number of pairs of an expert and a rank that `placement` has and `previous` does not.
std::size_t count_moves(const Block& block, const Placement& previous, const Placement& placement);

/// Improves `start` step by step. A step either swaps two places of different ranks or gives a place of an expert with
/// several replicas to another expert. It is taken only if afterwards every rank that it changed has less load than the
/// busiest rank had, so no step ever raises the highest load, and the search ends. Two replicas of an expert are never
/// brought together on a rank. Returns the best placement on the way: lowest in load + move_cost * arrivals.
///
/// A kick perturbs the placement: a few random swaps between ranks or, in every other one, replicas replaced by other
/// experts; the first change involves the busiest rank.
Placement improve(const Block& block, Placement start, const ExchangeLimits& limits);

}  // namespace ferry::balancing

#endif  // FERRY_BALANCE_EXCHANGE_HPP
