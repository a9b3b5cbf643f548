/// Rank blamed for a wait that lasts too long, with an artificial clock and artificial signs.

#include "call/silence_watch.hpp"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

namespace ferry::call {
namespace {

constexpr std::int64_t kTimeoutNs = 1600;
constexpr std::int64_t kIntervalNs = kTimeoutNs / 16;
/// Time between a rank's looks at the signs.
constexpr std::int64_t kTurnNs = kIntervalNs / 4;
constexpr int kMostRanks = 4;

/// Ranks of which one stops and each other waits for some of the remaining ranks.
struct World {
  int num_ranks = 0;
  int stopped = 0;
  std::int64_t stop_ns = 0;                      // until then the stopped rank waits and beats
  std::array<unsigned, kMostRanks> missing{};    // by rank: a set of ranks as bits
  std::array<std::int64_t, kMostRanks> begin{};  // by rank: start of its wait

  bool waits_for(int rank, int other) const { return (missing[static_cast<std::size_t>(rank)] >> other & 1U) != 0; }

  std::string text() const {
    std::string text = "rank " + std::to_string(stopped) + " stops at " + std::to_string(stop_ns);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      text += "; rank " + std::to_string(rank) + " waits for rank set " + std::to_string(missing[at]) + " from " +
              std::to_string(begin[at]);
    }
    return text;
  }

  /// Returns true if every chain of waiting ranks ends at the stopped one, as in a protocol without deadlocks.
  bool is_possible() const {
    unsigned held_up = 1U << stopped;
    for (int round = 0; round < num_ranks; ++round) {
      for (int rank = 0; rank < num_ranks; ++rank) {
        if ((missing[static_cast<std::size_t>(rank)] & held_up) != 0) held_up |= 1U << rank;
      }
    }
    return held_up == (1U << num_ranks) - 1;
  }
};

struct Outcome {
  int num_right = 0;
  int num_wrong = 0;
  std::int64_t first_ns = -1;
};

/// Ranks exchange no verdicts: each continues until it has blamed a rank itself, at most until it would stop waiting
/// for other ranks' verdicts.
Outcome play(const World& world) {
  const auto num_ranks = static_cast<std::size_t>(world.num_ranks);
  std::vector<SilenceWatch> watches(num_ranks, SilenceWatch(world.num_ranks, kTimeoutNs));
  std::vector<Sign> signs(num_ranks);
  std::vector<bool> waits(num_ranks, false);
  std::vector<bool> done(num_ranks, false);
  Outcome outcome;
  for (std::int64_t now_ns = 0; now_ns < 2 * kTimeoutNs; now_ns += kTurnNs) {
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      const bool runs = static_cast<int>(rank) != world.stopped || now_ns < world.stop_ns;
      if (!runs || now_ns < world.begin[rank]) continue;
      // The ranks' beats do not coincide.
      if (now_ns / kTurnNs % 4 == static_cast<std::int64_t>(rank % 4)) ++signs[rank].beats;
      if (static_cast<int>(rank) == world.stopped || done[rank]) continue;
      if (!waits[rank]) watches[rank].restart(now_ns);
      waits[rank] = true;
      if (now_ns - world.begin[rank] >= 2 * kTimeoutNs - kIntervalNs || !watches[rank].due(now_ns)) continue;
      std::vector<int> missing;
      for (int other = 0; other < world.num_ranks; ++other) {
        if (world.waits_for(static_cast<int>(rank), other)) missing.push_back(other);
      }
      const auto verdict =
          watches[rank].observe(missing, [&signs](int other) { return signs[static_cast<std::size_t>(other)]; });
      if (verdict.culprit < 0) continue;
      done[rank] = true;
      const bool right = verdict.culprit == world.stopped && verdict.is_silent;
      (right ? outcome.num_right : outcome.num_wrong) += 1;
      if (outcome.first_ns < 0) outcome.first_ns = now_ns;
    }
  }
  return outcome;
}

/// Calls `body` with every possible world of `num_ranks`: all sets of awaited ranks and all stopped ranks.
template <typename Body>
void for_each_world(int num_ranks, Body body) {
  const unsigned num_sets = 1U << num_ranks;
  World world{.num_ranks = num_ranks};
  for (world.stopped = 0; world.stopped < num_ranks; ++world.stopped) {
    for (unsigned code = 0; code < 1U << (num_ranks * num_ranks); ++code) {
      bool valid = true;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const unsigned set = code >> (rank * num_ranks) & (num_sets - 1);
        world.missing[static_cast<std::size_t>(rank)] = set;
        valid = valid && (set >> rank & 1U) == 0 && (set == 0) == (rank == world.stopped);
      }
      if (valid && world.is_possible()) body(world);
    }
  }
}

class SilenceWatchWorlds : public testing::TestWithParam<int> {};

/// In all worlds every rank that blames one before its patience ends blames the stopped rank, and at least one does in
/// time.
TEST_P(SilenceWatchWorlds, OnlyTheRankThatStoppedIsBlamed) {
  int num_worlds = 0;
  for_each_world(GetParam(), [&num_worlds](World world) {
    for (const std::int64_t stop_ns : {std::int64_t{0}, kTimeoutNs / 3, kTimeoutNs * 9 / 10}) {
      for (const std::int64_t lag_ns : {std::int64_t{0}, kTimeoutNs / 8}) {
        world.stop_ns = stop_ns;
        for (int rank = 0; rank < world.num_ranks; ++rank) {
          world.begin[static_cast<std::size_t>(rank)] = rank == world.stopped ? 0 : rank * lag_ns;
        }
        const Outcome outcome = play(world);
        ASSERT_EQ(outcome.num_wrong, 0) << world.text();
        ASSERT_GT(outcome.num_right, 0) << world.text();
        ASSERT_LT(outcome.first_ns, 2 * kTimeoutNs) << world.text();
        ++num_worlds;
      }
    }
  });
  EXPECT_GT(num_worlds, 0);
}

INSTANTIATE_TEST_SUITE_P(Ranks, SilenceWatchWorlds, testing::Values(2, 3, kMostRanks));

/// One rank that waits from time 0 for rank 1 of three.
class SilenceWatchOfOne : public testing::Test {
 protected:
  SilenceWatchOfOne() { watch_.restart(0); }

  /// Takes turns until `until_ns`; `change` updates rank 1's signs before each observation.
  template <typename Change>
  SilenceWatch::Verdict wait_until(std::int64_t until_ns, Change change) {
    for (; now_ns_ <= until_ns; now_ns_ += kTurnNs) {
      if (!watch_.due(now_ns_)) continue;
      change();
      const auto verdict = watch_.observe(missing_, [this](int rank) { return rank == 1 ? sign_ : Sign(); });
      if (verdict.culprit >= 0) return verdict;
    }
    return {};
  }

  SilenceWatch watch_{3, kTimeoutNs};
  std::vector<int> missing_ = {1};
  Sign sign_;
  std::int64_t now_ns_ = 0;
};

TEST_F(SilenceWatchOfOne, AnAbsentRankIsBlamedAtTheDeadline) {
  EXPECT_EQ(wait_until(kTimeoutNs - kTurnNs, [] {}).culprit, -1);
  EXPECT_EQ(wait_until(kTimeoutNs, [] {}).culprit, 1);
}

TEST_F(SilenceWatchOfOne, OfSeveralAbsentRanksTheLowestIsBlamed) {
  missing_ = {2, 1};
  EXPECT_EQ(wait_until(kTimeoutNs, [] {}).culprit, 1);
}

TEST_F(SilenceWatchOfOne, ARankThatMakesProgressIsWaitedFor) {
  const auto work = [this] { ++sign_.progress; };
  EXPECT_EQ(wait_until(10 * kTimeoutNs, work).culprit, -1);
  EXPECT_EQ(wait_until(11 * kTimeoutNs - kIntervalNs, [] {}).culprit, -1);
  EXPECT_EQ(wait_until(11 * kTimeoutNs + kIntervalNs, [] {}).culprit, 1);
}

TEST_F(SilenceWatchOfOne, ProgressOfLongAgoIsNoReasonToWait) {
  sign_ = {1, 1};
  EXPECT_EQ(wait_until(kIntervalNs, [] {}).culprit, -1);
  sign_ = {2, 2};  // the first beat of this wait, which also reports progress from before it
  EXPECT_EQ(wait_until(kTimeoutNs, [] {}).culprit, 1);
}

TEST_F(SilenceWatchOfOne, ARankThatOnlyWaitsIsWaitedForTwiceAsLong) {
  const auto beat = [this] { ++sign_.beats; };
  EXPECT_EQ(wait_until(2 * kTimeoutNs - kIntervalNs, beat).culprit, -1);
  const auto verdict = wait_until(2 * kTimeoutNs, beat);
  EXPECT_EQ(verdict.culprit, 1);
  EXPECT_FALSE(verdict.is_silent);
}

TEST_F(SilenceWatchOfOne, WhatThisRankDoesRestartsTheDeadline) {
  EXPECT_EQ(wait_until(kTimeoutNs - kTurnNs, [] {}).culprit, -1);
  watch_.restart(now_ns_);
  EXPECT_EQ(wait_until(2 * kTimeoutNs - 2 * kTurnNs, [] {}).culprit, -1);
  EXPECT_EQ(wait_until(2 * kTimeoutNs, [] {}).culprit, 1);
}

TEST_F(SilenceWatchOfOne, ARankThatWasItselfStoppedBlamesNoRankAtOnce) {
  const auto beat = [this] { ++sign_.beats; };
  EXPECT_EQ(wait_until(kTimeoutNs * 9 / 10, beat).culprit, -1);
  now_ns_ += 100 * kTimeoutNs;
  const std::int64_t continued_ns = now_ns_;
  EXPECT_EQ(wait_until(continued_ns + kIntervalNs, [] {}).culprit, -1) << "no beat is seen at first";
  EXPECT_EQ(wait_until(continued_ns + kTimeoutNs / 2, beat).culprit, -1);
}

}  // namespace
}  // namespace ferry::call
