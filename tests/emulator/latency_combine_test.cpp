/// Combine of latency mode on emulated GPUs must give the oracle's bits in every order of blocks and ranks.

#include "emulator/latency_combine.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

namespace ferry::emulator {
namespace {

using cuda::LatencyKind;

constexpr std::int64_t kLatencyBytes = std::int64_t{24} << 20;

LatencyCombineSpec draw_combine(std::mt19937_64& random) {
  constexpr std::int64_t kHidden[] = {8, 24, 256, 600, 1544};
  LatencyCombineSpec spec;
  spec.hidden = kHidden[random() % std::size(kHidden)];
  spec.float32 = random() % 3 == 0;
  spec.order = random() % 2 == 0 ? CombineOrder::kExact : CombineOrder::kRankSums;
  spec.own_weights = random() % 3 == 0;
  spec.gap_bytes = static_cast<std::int64_t>(random() % 2) * 16;
  spec.num_blocks = 2 + static_cast<int>(random() % 3);
  spec.words = random() % 4 != 0;
  spec.seed = random();
  if (spec.order == CombineOrder::kRankSums && random() % 3 == 0) {
    constexpr std::int64_t kFp8Hidden[] = {128, 384, 1024, 1152, 2176};
    spec.hidden = kFp8Hidden[random() % std::size(kFp8Hidden)];
    spec.fp8 = true;
    spec.float32 = false;
  }
  if (!spec.words) spec.num_helpers = static_cast<int>(spec.seed % static_cast<std::uint64_t>(spec.num_blocks - 1));
  return spec;
}

TEST(EmulatedLatencyCombine, ManyCallsGiveTheBitsOfTheOracle) {
  constexpr int kWorlds = 12;
  constexpr int kCalls = 4;
  std::mt19937_64 random(14);
  for (int i = 0; i < kWorlds; ++i) {
    const test::WorldSpec world = draw_latency_world(random);
    // Includes calls across the wrap of the lower half of the call number.
    LatencyRanks ranks({.num_ranks = world.num_ranks,
                        .latency_bytes = kLatencyBytes,
                        .seed = random(),
                        .calls_before = i % 4 == 0 ? (std::uint64_t{1} << 32) - 3 : 0});
    const LatencyRouting routing(ranks, test::make_world(world), world.max_tokens + i % 2);
    std::vector<std::unique_ptr<LatencyCombine>> calls;
    for (int rank = 0; rank < world.num_ranks; ++rank) routing.fill(rank);
    for (int call = 0; call < kCalls; ++call) {
      calls.push_back(std::make_unique<LatencyCombine>(ranks, routing, draw_combine(random)));
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        calls.back()->run(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      EXPECT_EQ(ranks.report(rank).lost.state, 0U) << "world " << i << " rank " << rank;
      EXPECT_EQ(ranks.report(rank).fault.state, 0U) << "world " << i << " rank " << rank;
      EXPECT_EQ(ranks.num_sent(rank, LatencyKind::kCombine), static_cast<std::uint64_t>(kCalls));
      for (int call = 0; call < kCalls; ++call) {
        EXPECT_EQ(calls[static_cast<std::size_t>(call)]->compare(rank), "") << "world " << i << " call " << call;
      }
    }
  }
}

TEST(EmulatedLatencyCombine, TwoInFlightAreReceivedInAnyOrder) {
  constexpr int kWorlds = 6;
  constexpr int kRounds = 3;
  std::mt19937_64 random(15);
  for (int i = 0; i < kWorlds; ++i) {
    const test::WorldSpec world = draw_latency_world(random);
    LatencyRanks ranks({.num_ranks = world.num_ranks, .latency_bytes = kLatencyBytes, .seed = random()});
    test::WorldSpec other = world;
    other.seed = random();
    const LatencyRouting routings[] = {LatencyRouting(ranks, test::make_world(world), world.max_tokens),
                                       LatencyRouting(ranks, test::make_world(other), world.max_tokens)};
    std::vector<std::unique_ptr<LatencyCombine>> calls;
    for (const LatencyRouting& routing : routings) {
      for (int rank = 0; rank < world.num_ranks; ++rank) routing.fill(rank);
    }
    for (std::size_t round = 0; round < kRounds; ++round) {
      for (const LatencyRouting& routing : routings) {
        calls.push_back(std::make_unique<LatencyCombine>(ranks, routing, draw_combine(random)));
      }
      for (int rank = 0; rank < world.num_ranks; ++rank) {
        calls[2 * round]->send(rank);
        calls[2 * round + 1]->send(rank);
        const std::size_t first = random() % 2;
        calls[2 * round + first]->receive(rank);
        calls[2 * round + 1 - first]->receive(rank);
      }
    }
    ASSERT_EQ(ranks.machine().run(), "") << "world " << i;
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      EXPECT_EQ(ranks.report(rank).lost.state, 0U) << "world " << i << " rank " << rank;
      for (const auto& call : calls) EXPECT_EQ(call->compare(rank), "") << "world " << i;
    }
  }
}

TEST(EmulatedLatencyCombine, DisagreementsAreSeenByAllAndTheNextCallIsGood) {
  for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums}) {
    for (const bool own_weights : {false, true}) {
      constexpr int kNumRanks = 3;
      LatencyRanks ranks({.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = 5});
      const LatencyRouting routing(
          ranks, test::make_world({.num_ranks = kNumRanks, .max_tokens = 5, .layout = Layout::kSlab}), 5);
      LatencyCombineSpec spec{.order = order, .own_weights = own_weights};
      LatencyCombine refused(ranks, routing, spec);
      LatencyCombine good(ranks, routing, spec);
      // Rank 1 sends sums with other weights: it sends no words for the others' sums, and rows where they send words.
      spec.own_weights = false;
      spec.words = false;
      LatencyCombine other(ranks, routing, spec);
      for (int rank = 0; rank < kNumRanks; ++rank) {
        routing.fill(rank);
        if (rank == 1) {
          other.send_other(rank, 5);
          other.receive_other(rank, 5);
        } else {
          refused.run(rank);
        }
        good.run(rank);
      }
      ASSERT_EQ(ranks.machine().run(), "");
      for (int rank = 0; rank < kNumRanks; ++rank) {
        const cuda::FaultReport& fault = ranks.report(rank).fault;
        EXPECT_EQ(ranks.report(rank).lost.state, 0U);
        ASSERT_EQ(fault.state, 1U);
        EXPECT_EQ(fault.fault, static_cast<std::int32_t>(cuda::Fault::kDisagreement));
        for (int peer = 0; peer < kNumRanks; ++peer) EXPECT_EQ(fault.record_numbers[peer], 100 + peer);
        EXPECT_TRUE(refused.is_untouched(rank));
        EXPECT_TRUE(other.is_untouched(rank));
        EXPECT_EQ(good.compare(rank), "");
      }
    }
  }
}

/// A set must not be granted again while a rank that makes another call may still store rows into it.
TEST(EmulatedLatencyCombine, ASmallCallWaitsForTheRowsOfAnotherCall) {
  LatencyRanks ranks({.num_ranks = 2, .latency_bytes = kLatencyBytes, .seed = 9});
  const LatencyRouting routing(ranks, test::make_world({.num_ranks = 2, .max_tokens = 3, .layout = Layout::kSlab}), 3);
  for (int rank = 0; rank < 2; ++rank) routing.fill(rank);
  LatencyCombine call(ranks, routing, {.order = CombineOrder::kRankSums});
  cuda::LatencyHeader header;
  header.agreement = 5;
  header.blocks_or_homes = 2;  // no block reports that it is done
  ranks.put_header(0, LatencyKind::kCombine, 1, 1, 0, header);
  call.run_whole(0);
  ASSERT_EQ(ranks.machine().run(), "");
  EXPECT_EQ(ranks.report(0).lost.state, 1U);
  EXPECT_EQ(ranks.report(0).lost.peer, 1);
  EXPECT_EQ(ranks.report(0).lost.awaited, static_cast<std::int32_t>(cuda::Awaited::kRow));
  EXPECT_EQ(ranks.num_sent(0, LatencyKind::kCombine), 0U);
  EXPECT_TRUE(call.is_untouched(0));
}

/// Rows are loaded before a call's turn, which is where the call finds that the group is broken.
TEST(EmulatedLatencyCombine, BehindACallInWhichTheGroupBrokeTablesMayHoldAnything) {
  constexpr int kNumRanks = 2;
  constexpr int kMaxTokens = 3;
  constexpr std::int32_t kNoRow = std::int32_t{1} << 30;
  for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums}) {
    LatencyRanks ranks({.num_ranks = kNumRanks, .latency_bytes = kLatencyBytes, .seed = 9});
    const LatencyRouting routing(
        ranks, test::make_world({.num_ranks = kNumRanks, .max_tokens = kMaxTokens, .layout = Layout::kSlab}),
        kMaxTokens);
    routing.fill(0);
    LatencyCombine lost(ranks, routing, {.order = order});
    LatencyCombine next(ranks, routing, {.order = order});
    lost.run_whole(0);  // rank 1 never arrives
    ASSERT_EQ(ranks.machine().run(), "");
    ASSERT_EQ(ranks.report(0).lost.state, 1U);
    const cuda::LatencyTables& tables = routing.tables(0);
    std::fill_n(tables.items, kNumRanks * kMaxTokens * routing.world().num_topk, kNoRow);
    std::fill_n(tables.tokens_of_rank, kNumRanks, kNoRow);
    next.run_whole(0);
    ASSERT_EQ(ranks.machine().run(), "");
    EXPECT_TRUE(next.is_untouched(0));
  }
}

TEST(EmulatedLatencyCombine, LostRankIsReportedByEachHalf) {
  for (const bool waits_for_weights : {false, true}) {
    LatencyRanks ranks({.num_ranks = 2, .latency_bytes = kLatencyBytes, .seed = 9});
    const LatencyRouting routing(ranks, test::make_world({.num_ranks = 2, .max_tokens = 3, .layout = Layout::kSlab}),
                                 3);
    for (int rank = 0; rank < 2; ++rank) routing.fill(rank);
    LatencyCombineSpec spec;
    if (waits_for_weights) spec = {.order = CombineOrder::kRankSums, .own_weights = true};
    LatencyCombine call(ranks, routing, spec);
    // Rank 1 never arrives. The send half waits only for sums with rank 1's weights.
    call.send(0);
    ASSERT_EQ(ranks.machine().run(), "");
    EXPECT_EQ(ranks.report(0).lost.state, waits_for_weights ? 1U : 0U);
    call.receive(0);
    ASSERT_EQ(ranks.machine().run(), "");
    EXPECT_EQ(ranks.report(0).lost.state, 1U);
    EXPECT_EQ(ranks.report(0).lost.peer, 1);
    EXPECT_TRUE(call.is_untouched(0));
  }
}

}  // namespace
}  // namespace ferry::emulator
