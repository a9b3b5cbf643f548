#ifndef FERRY_TESTS_CHANNEL_CHECK_HPP
#define FERRY_TESTS_CHANNEL_CHECK_HPP

#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

/// Compares Group::channel_tables of a Routing of layout kTokens with what the tokens of all ranks say.
void check_channel_tables(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                          int num_channels);

}  // namespace ferry::test

#endif  // FERRY_TESTS_CHANNEL_CHECK_HPP
