#ifndef FERRY_TESTS_CHANNEL_CHECK_HPP
#define FERRY_TESTS_CHANNEL_CHECK_HPP

#include <functional>
#include <memory>

#include "ferry/channel_tables.hpp"
#include "support/exchange_case.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {

/// Compares Group::channel_tables of a Routing of layout kTokens with tables computed from the tokens of all ranks.
void check_channel_tables(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                          int num_channels);

/// Tables that a route of layout kTokens writes while it waits for its counts; only exact routes of CUDA groups do so.
/// The tables have room for a few rows more or less than arrive.
class EarlyChannelTables {
 public:
  EarlyChannelTables(const Group& group, const PreparedCase& prepared, int rank, int num_channels);
  ~EarlyChannelTables();

  /// Argument of Group::route, for one call.
  std::function<EarlyTables()> while_waiting();
  /// Checks the tables after the route.
  void check(RankContext& context) const;

 private:
  struct Tables;
  std::unique_ptr<Tables> tables_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_CHANNEL_CHECK_HPP
