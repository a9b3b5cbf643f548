#ifndef FERRY_TESTS_UCX_CARD_ROUNDS_HPP
#define FERRY_TESTS_UCX_CARD_ROUNDS_HPP

#include "support/exchange_check.hpp"

namespace ferry::test {

/// An exchange between hosts of one rank each.
PreparedCase exchange_between(int num_hosts);

/// Routes, dispatches and combines up to `num_rounds` times, until an error. Reports results that are not the oracle's.
Status exchange_rounds(RankContext& context, Group& group, const PreparedCase& prepared, int num_rounds);

}  // namespace ferry::test

#endif  // FERRY_TESTS_UCX_CARD_ROUNDS_HPP
