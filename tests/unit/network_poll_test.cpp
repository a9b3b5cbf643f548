/// GroupOptions::network_poll_ns and the variable in its place, and when the network of GPU ranks sleeps.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>

#include "ferry/ferry.hpp"
#include "rail/rest.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

using rail::Rest;

constexpr const char* kPollVariable = "FERRY_NETWORK_POLL";
constexpr std::int64_t kIntervalNs = kNsPerSecond / 50;

/// Number of looks without a movement until the network may sleep; 0: it did not in `max_looks`.
int looks_until_sleep(Rest& rest, std::uint64_t sum, int max_looks) {
  for (int num_looks = 1; num_looks <= max_looks; ++num_looks) {
    if (rest.look(sum) == Rest::Decision::kSleep) return num_looks;
  }
  return 0;
}

Status create_with(std::int64_t network_poll_ns) {
  Status status;
  run_ranks({.num_ranks = 1}, [&](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.network_poll_ns = network_poll_ns;
    status = Group::create(context.bootstrap(), options).status();
  });
  return status;
}

TEST(NetworkPoll, TheNetworkSleepsThatLongAfterTheLastMovement) {
  Rest rest(kNsPerSecond, kIntervalNs);
  EXPECT_EQ(rest.look(1), Rest::Decision::kPoll);
  EXPECT_EQ(looks_until_sleep(rest, 1, 1000), 50);
  EXPECT_EQ(looks_until_sleep(rest, 1, 1000), 0) << "it sleeps already";
  EXPECT_EQ(rest.look(2), Rest::Decision::kPoll);
  EXPECT_EQ(looks_until_sleep(rest, 2, 30), 0);
  EXPECT_EQ(rest.look(3), Rest::Decision::kPoll);
  EXPECT_EQ(looks_until_sleep(rest, 3, 1000), 50) << "a movement starts the time again";
  Rest longer(60 * kNsPerSecond + 1, kIntervalNs);
  EXPECT_EQ(longer.look(1), Rest::Decision::kPoll);
  EXPECT_EQ(looks_until_sleep(longer, 1, 10'000), 3001);
}

TEST(NetworkPoll, TheNetworkNeverSleepsWhereAsked) {
  Rest rest(kAlwaysPoll, kIntervalNs);
  EXPECT_EQ(rest.look(1), Rest::Decision::kPoll);
  EXPECT_EQ(looks_until_sleep(rest, 1, 1'000'000), 0);
}

TEST(NetworkPoll, MayDifferByRank) {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.network_poll_ns = context.rank() == 0 ? kAlwaysPoll : kNsPerSecond;
    context.expect_ok(Group::create(context.bootstrap(), options).status(), "different times");
  });
}

TEST(NetworkPoll, IsRefusedWhereItIsNoTime) {
  for (const std::int64_t none : {std::int64_t{-2}, std::int64_t{25} * 3600 * kNsPerSecond}) {
    const Status refused = create_with(none);
    EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument) << none;
    EXPECT_NE(refused.message().find("network_poll_ns"), std::string::npos) << refused.to_string();
  }
  for (const char* text : {"never", "-1", "0", "3x", "1.5", "99999999999", "86401"}) {
    ASSERT_EQ(setenv(kPollVariable, text, 1), 0);
    const Status refused = create_with(kDefaultNetworkPoll);
    EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument) << text;
    EXPECT_NE(refused.message().find(kPollVariable), std::string::npos) << refused.to_string();
    EXPECT_TRUE(create_with(kAlwaysPoll).ok()) << "an option replaces the variable";
  }
  for (const char* text : {"", "always", "60", "86400"}) {
    ASSERT_EQ(setenv(kPollVariable, text, 1), 0);
    EXPECT_TRUE(create_with(kDefaultNetworkPoll).ok()) << text;
  }
  unsetenv(kPollVariable);
}

}  // namespace
}  // namespace ferry::test
