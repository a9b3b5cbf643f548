/// GroupOptions::network_service_level and network_paths: their ranges, and groups that use no card.

#include <gtest/gtest.h>

#include <string>

#include "ferry/ferry.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

Status create_with(int service_level, int num_paths) {
  Status status;
  run_ranks({.num_ranks = 1}, [&](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.network_service_level = service_level;
    options.network_paths = num_paths;
    status = Group::create(context.bootstrap(), options).status();
  });
  return status;
}

TEST(CardSettings, HaveTheRangesOfCards) {
  for (const int level : {kDefaultServiceLevel, 0, kMaxServiceLevel}) EXPECT_TRUE(create_with(level, 0).ok()) << level;
  for (const int paths : {0, 1, kMaxNetworkPaths}) EXPECT_TRUE(create_with(-1, paths).ok()) << paths;
  for (const int level : {-2, kMaxServiceLevel + 1}) {
    const Status status = create_with(level, 0);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find("network_service_level is " + std::to_string(level)),
              std::string::npos)
        << status.message();
  }
  for (const int paths : {-1, kMaxNetworkPaths + 1}) {
    const Status status = create_with(kDefaultServiceLevel, paths);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find("network_paths is " + std::to_string(paths)), std::string::npos)
        << status.message();
  }
}

TEST(CardSettings, MayDifferByRankAndDoNothingWithoutACard) {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    GroupOptions options{.backend = "cpu", .ranks_per_node = 1, .transport = "loopback"};
    options.network_service_level = context.rank() == 0 ? 3 : kDefaultServiceLevel;
    options.network_paths = context.rank() == 0 ? 4 : 0;
    const auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    const NetworkUsage usage = (*group)->network_usage();
    context.expect(usage.service_level == kDefaultServiceLevel && usage.num_paths == 0, "settings without a card");
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

}  // namespace
}  // namespace ferry::test
