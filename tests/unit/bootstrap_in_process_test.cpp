#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kLongNs = 60 * kNsPerSecond;
constexpr std::int64_t kShortNs = kNsPerSecond / 5;

TEST(InProcessBootstrap, EveryRankGetsEveryMessageByRankRoundAfterRound) {
  constexpr int kNumRanks = 16;
  constexpr int kNumRounds = 50;
  const auto group = create_in_process_bootstraps(kNumRanks).value();
  const auto message = [](int rank, int round) {
    return bytes_of(std::string(static_cast<std::size_t>((rank + round) % 3), static_cast<char>('a' + rank)));
  };
  const auto failures = run_threads(kNumRanks, [&](int rank) {
    int num_wrong = 0;
    for (int round = 0; round < kNumRounds; ++round) {
      Messages expected;
      for (int other = 0; other < kNumRanks; ++other) expected.push_back(message(other, round));
      const auto result = group[static_cast<std::size_t>(rank)]->all_gather(message(rank, round), kLongNs);
      if (!result.ok() || *result != expected) ++num_wrong;
    }
    return num_wrong;
  });
  EXPECT_THAT(failures, testing::Each(0));
}

TEST(InProcessBootstrap, KnowsItsRank) {
  const auto group = create_in_process_bootstraps(3).value();
  ASSERT_EQ(group.size(), 3U);
  EXPECT_EQ(group[2]->rank(), 2);
  EXPECT_EQ(group[2]->num_ranks(), 3);
}

TEST(InProcessBootstrap, NeedsARank) {
  const Status status = create_in_process_bootstraps(0).status();
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("num_ranks=0"));
}

TEST(InProcessBootstrap, LowestMissingRankIsNamedAndTheErrorStays) {
  const auto group = create_in_process_bootstraps(4).value();
  const auto statuses = run_threads(2, [&](int thread) {
    return group[thread == 0 ? 0 : 3]->all_gather({}, thread == 0 ? kShortNs : kLongNs).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
    EXPECT_EQ(status.peer(), 1);
  }
  EXPECT_EQ(group[1]->all_gather({}, kLongNs).status().to_string(), statuses[0].to_string());
  EXPECT_EQ(group[0]->all_gather({}, kLongNs).status().to_string(), statuses[0].to_string());
}

TEST(InProcessBootstrap, RankThatLeavesWhileOthersGatherIsNamed) {
  auto group = create_in_process_bootstraps(3).value();
  const auto statuses = run_threads(3, [&](int rank) {
    if (rank != 1) return group[static_cast<std::size_t>(rank)]->all_gather({}, kLongNs).status();
    group[1].reset();
    return Status();
  });
  for (const int rank : {0, 2}) {
    EXPECT_EQ(statuses[static_cast<std::size_t>(rank)].code(), ErrorCode::kPeerLost);
    EXPECT_EQ(statuses[static_cast<std::size_t>(rank)].peer(), 1);
  }
}

TEST(InProcessBootstrap, LeavingAfterTheResultHarmsNoRank) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    auto group = create_in_process_bootstraps(4).value();
    const auto statuses = run_threads(4, [&](int rank) {
      const Status status = group[static_cast<std::size_t>(rank)]->all_gather(bytes_of("x"), kLongNs).status();
      group[static_cast<std::size_t>(rank)].reset();
      return status;
    });
    for (const Status& status : statuses) ASSERT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(InProcessBootstrap, TooLongMessageIsRefusedOnEveryRank) {
  const auto group = create_in_process_bootstraps(2).value();
  const auto statuses = run_threads(2, [&](int rank) {
    const std::size_t size_bytes = kMaxBootstrapMessageBytes + static_cast<std::size_t>(rank);
    return group[static_cast<std::size_t>(rank)]->all_gather(std::vector<std::byte>(size_bytes), kLongNs).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
    EXPECT_EQ(status.peer(), 1);
  }
}

}  // namespace
}  // namespace ferry::test
