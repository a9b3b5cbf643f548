/// Dispatch and combine over several nodes by emulated GPUs, with a slow network: they must give the oracle's bits.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "emulator/node_calls.hpp"

namespace ferry::emulator {
namespace {

std::vector<NodesSpec> specs() {
  return {{},
          {.ranks_per_node = 2, .weighted = true},
          {.num_nodes = 4, .num_topk = 5, .float32 = true, .num_biases = 2, .wide_ids = true, .num_chunks = 1},
          {.num_nodes = 3, .ranks_per_node = 2, .layout = Layout::kExperts, .weighted = true, .alignment = 4},
          {.ranks_per_node = 3, .layout = Layout::kSlab, .scale_bytes = 7, .slab_capacity = 64, .seed = 4},
          // Items longer than a chunk.
          {.ranks_per_node = 2, .num_tokens = 4, .hidden = 1000, .num_biases = 1, .seed = 5},
          // Several pieces of an item in a chunk, several chunks in progress.
          {.num_tokens = 12, .hidden = 1800, .num_chunks = 5, .chunk_bytes = 8192, .seed = 8},
          {.layout = Layout::kExperts, .hidden = 8, .scale_bytes = 0, .num_chunks = 4, .seed = 6},
          // Long enough that chunks are larger than those of short exchanges, and smaller than the ring's.
          {.num_tokens = 280,
           .hidden = 6144,
           .num_chunks = 3,
           .chunk_bytes = std::size_t{512} << 10,
           .seed = 9,
           .arena_bytes = std::size_t{128} << 20},
          // Long enough that the first and the last chunks are smaller, in one stage and in two.
          {.num_tokens = 90,
           .hidden = 8192,
           .num_chunks = 16,
           .chunk_bytes = std::size_t{256} << 10,
           .seed = 15,
           .arena_bytes = std::size_t{64} << 20},
          // Call headers in rings of their own.
          {.num_nodes = 3, .ranks_per_node = 2, .weighted = true, .seed = 17, .has_call_rings = true},
          {.num_tokens = 90, .num_chunks = 4, .seed = 18, .has_call_rings = true},
          // Sums that begin before nodes agree, for one peer and for several, in either form of call headers.
          {.num_nodes = 3, .ranks_per_node = 2, .num_tokens = 60, .num_chunks = 4, .seed = 20},
          {.num_nodes = 3, .ranks_per_node = 2, .num_tokens = 60, .num_chunks = 3, .seed = 21, .has_call_rings = true},
          {.ranks_per_node = 3, .layout = Layout::kExperts, .num_tokens = 50, .seed = 22, .has_call_rings = true},
          {.num_nodes = 4, .ranks_per_node = 3, .float32 = true, .num_biases = 1, .num_chunks = 1, .seed = 23},
          {.num_tokens = 120,
           .hidden = 8192,
           .weighted = true,
           .num_chunks = 5,
           .chunk_bytes = std::size_t{512} << 10,
           .seed = 16,
           .arena_bytes = std::size_t{64} << 20,
           .chunk_items = 16},
          {.num_nodes = 3, .num_tokens = 0, .weighted = true, .seed = 7},
          // Ranks that choose how many items a chunk has, each another number, the first of them one.
          {.num_nodes = 3, .weighted = true, .num_chunks = 3, .seed = 10, .chunk_items = 1},
          {.ranks_per_node = 2, .num_tokens = 40, .chunk_bytes = 4096, .seed = 11, .chunk_items = 5},
          // More than a chunk holds, and items longer than a chunk.
          {.num_tokens = 30, .seed = 13, .chunk_items = 1 << 20},
          {.num_tokens = 4, .hidden = 1000, .seed = 14, .chunk_items = 2}};
}

class Nodes : public testing::TestWithParam<NodesSpec> {};
INSTANTIATE_TEST_SUITE_P(, Nodes, testing::ValuesIn(specs()));

TEST_P(Nodes, CallsGiveTheOraclesBits) {
  NodeCalls group(GetParam());
  const NodeCalls::Dispatched first = group.dispatch();
  const NodeCalls::Combined sums = group.combine();
  const NodeCalls::Dispatched second = group.dispatch();
  ASSERT_EQ(group.ranks().run(), "");
  group.check(first);
  group.check(sums);
  group.check(second);
  EXPECT_TRUE(group.ranks().is_drained());
}

/// A dispatch sends a call header and its rows; a combine that is not weighted sends another header ahead of its sums,
/// also where ranks make sums of their node.
TEST(NodesChunks, HaveAsManyRowsAsTheirSenderSays) {
  for (const int chunk_items : {1, 2, 4}) {
    SCOPED_TRACE(chunk_items);
    NodeCalls group({.num_tokens = 30, .hidden = 8, .chunk_bytes = 8192, .chunk_items = chunk_items});
    const std::int64_t num_items = group.num_items_out();
    ASSERT_GT(num_items, 8);
    const NodeCalls::Dispatched rows = group.dispatch();
    ASSERT_EQ(group.ranks().run(), "");
    group.check(rows);
    EXPECT_EQ(group.ranks().num_sent(0, 1), 1 + to_size((num_items + chunk_items - 1) / chunk_items));
  }
  NodeCalls group({.ranks_per_node = 2, .num_tokens = 30, .hidden = 8, .chunk_bytes = 8192, .chunk_items = 1});
  const std::int64_t num_items = group.num_items_out();
  ASSERT_GT(num_items, 8);
  const NodeCalls::Combined sums = group.combine();
  ASSERT_EQ(group.ranks().run(), "");
  group.check(sums);
  constexpr int kItemsOfRank2 = 3;
  EXPECT_EQ(group.ranks().num_sent(2, 0), 1 + to_size((num_items + kItemsOfRank2 - 1) / kItemsOfRank2));
}

/// Rank 0's header never comes, so that ranks of node 1 may not write what their callers see.
TEST(NodesChunks, BringSumsBeforeNodesHaveAgreed) {
  for (const bool has_call_rings : {false, true}) {
    SCOPED_TRACE(has_call_rings);
    NodeCalls group({.ranks_per_node = 2, .num_tokens = 90, .num_chunks = 6, .has_call_rings = has_call_rings});
    const NodeCalls::Combined sums = group.combine();
    group.ranks().cut(0);
    ASSERT_EQ(group.ranks().run(), "");
    EXPECT_EQ(group.ranks().num_sent(2, 0), 6U);
    EXPECT_TRUE(group.is_untouched(sums, 2));
    EXPECT_TRUE(group.is_untouched(sums, 3));
    EXPECT_EQ(group.ranks().report(2).lost.awaited, static_cast<std::int32_t>(cuda::Awaited::kRailCall));
    EXPECT_EQ(group.ranks().report(3).lost.awaited, static_cast<std::int32_t>(cuda::Awaited::kEntry));
    EXPECT_EQ(group.ranks().report(3).lost.peer, 0);
  }
}

/// Call counters are in memory: rings and ranks continue where the previous replay left them.
TEST(NodesReplayed, RecordedCallsBringWhatLiesInTheSameMemory) {
  for (const bool weighted : {false, true}) {
    SCOPED_TRACE(weighted);
    NodeCalls group({.ranks_per_node = 2, .weighted = weighted, .num_biases = 1, .seed = 8});
    NodeCalls::Dispatched dispatch = group.dispatch();
    NodeCalls::Combined combine = group.combine();
    for (int replay = 0; replay < 3; ++replay) {
      SCOPED_TRACE(replay);
      if (replay > 0) {
        group.refill(dispatch);
        group.refill(combine);
        group.replay();
      }
      ASSERT_EQ(group.ranks().run(), "");
      group.check(dispatch);
      group.check(combine);
      EXPECT_TRUE(group.ranks().is_drained());
    }
  }
}

/// Expects the faults of a call in which rank `other` of nodes with `ranks_per_node` ranks made a different one.
void expect_disagreement(NodeCalls& group, int other, bool other_refuses) {
  const int ranks_per_node = group.ranks().options().ranks_per_node;
  const int num_nodes = group.ranks().options().num_nodes;
  for (int rank = 0; rank < group.ranks().num_ranks(); ++rank) {
    cuda::FaultReport& fault = group.ranks().report(rank).fault;
    EXPECT_EQ(fault.state, rank == other && other_refuses ? 0U : 1U) << rank;
    fault.state = 0;
    // Ranks of other nodes have the record of `other`, and no other, from its rail peer.
    if (rank / ranks_per_node == other / ranks_per_node) continue;
    for (int local = 0; local < ranks_per_node; ++local) {
      const auto node = other / ranks_per_node;
      const cuda::FoundRecord& found = group.ranks().found(rank)[to_size(local * num_nodes + node)];
      EXPECT_EQ(found.present, local == other % ranks_per_node ? 1U : 0U) << rank;
      const std::int64_t caller = found.present != 0 ? found.record.fields[0] : other;
      EXPECT_EQ(caller, other) << rank;
    }
  }
}

TEST(NodesRefused, ByOneRankMovesNothingAnywhere) {
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    const int other = i % 4;
    // The larger rings have room for several chunks with items, which are on their way when the call is refused.
    NodeCalls group({.ranks_per_node = 2,
                     .num_tokens = i < 4 ? 9 : 150,
                     .num_chunks = i < 4 ? 2U : 7U,
                     .has_call_rings = i % 3 == 0});
    const NodeCalls::Dispatched refused = group.dispatch(other);
    ASSERT_EQ(group.ranks().run(), "");
    EXPECT_TRUE(group.is_untouched(refused));
    expect_disagreement(group, other, true);
    const NodeCalls::Dispatched next = group.dispatch();
    ASSERT_EQ(group.ranks().run(), "");
    group.check(next);
  }
}

/// Nodes whose ranks agree make sums, and all send the chunks that they have promised, which are dropped.
TEST(NodesRefused, CombineEndsOnAllRanksWhileNodesMakeSums) {
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    const int num_nodes = i < 4 ? 2 : 3;
    const int ranks_per_node = i < 4 ? 2 + i % 2 : 2;
    const int other = i % (num_nodes * ranks_per_node);
    const auto instead = i % 3 == 0 ? NodeCalls::Instead::kRefusal : NodeCalls::Instead::kOtherWeights;
    NodeCalls group({.num_nodes = num_nodes,
                     .ranks_per_node = ranks_per_node,
                     .num_tokens = i % 5 == 0 ? 9 : 40,
                     .num_chunks = i % 5 == 0 ? 2U : 7U,
                     .seed = static_cast<std::uint64_t>(i) + 1,
                     .has_call_rings = i / 2 % 2 == 0});
    if (i % 2 == 1) group.ranks().delay((other + 1) % group.ranks().num_ranks(), NodeRanks::kTimeoutNs / 4);
    const NodeCalls::Combined refused = group.combine({other}, instead);
    ASSERT_EQ(group.ranks().run(), "");
    for (int rank = 0; rank < group.ranks().num_ranks(); ++rank) EXPECT_TRUE(group.is_untouched(refused, rank));
    expect_disagreement(group, other, instead == NodeCalls::Instead::kRefusal);
    EXPECT_TRUE(group.ranks().is_drained());
    const NodeCalls::Combined next = group.combine();
    ASSERT_EQ(group.ranks().run(), "");
    group.check(next);
  }
}

/// No rail peer makes another call, and no rank of a node the same.
TEST(NodesRefused, CombineOfOneRailBesideAnotherCallOfTheOther) {
  for (const bool has_call_rings : {false, true}) {
    SCOPED_TRACE(has_call_rings);
    NodeCalls group({.ranks_per_node = 2, .num_tokens = 40, .num_chunks = 4, .has_call_rings = has_call_rings});
    const NodeCalls::Combined refused = group.combine({1, 3}, NodeCalls::Instead::kOtherWeights);
    ASSERT_EQ(group.ranks().run(), "");
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_TRUE(group.is_untouched(refused, rank));
      cuda::FaultReport& fault = group.ranks().report(rank).fault;
      EXPECT_EQ(fault.state, 1U) << rank;
      EXPECT_NE(fault.record_numbers[0], fault.record_numbers[1]) << rank;
      fault.state = 0;
      for (const cuda::FoundRecord& found : group.ranks().found(rank)) EXPECT_EQ(found.present, 0U) << rank;
    }
    EXPECT_TRUE(group.ranks().is_drained());
    const NodeCalls::Combined next = group.combine();
    ASSERT_EQ(group.ranks().run(), "");
    group.check(next);
  }
}

TEST(NodesLost, KernelsOfAllRanksEndWhenALinkIsCut) {
  NodeCalls group({.ranks_per_node = 2});
  group.dispatch();
  group.combine();
  group.ranks().cut(1);
  ASSERT_EQ(group.ranks().run(), "");
  // The link is cut in one direction. Rank 3 does not receive rank 1's call, nor rank 2 rank 3's entry. Ranks 0 and 1
  // have the calls and the tokens of all ranks, which were sent behind the calls. In the combine rank 0 waits for rank
  // 2's call, and rank 1 for rank 3's, or for room behind the chunks that do not leave, which ends at the same time.
  using enum cuda::Awaited;
  constexpr std::array kAwaited = {kRailCall, kRailCall, kEntry, kRailCall};
  for (int rank = 0; rank < 4; ++rank) {
    const cuda::LostReport& lost = group.ranks().report(rank).lost;
    EXPECT_EQ(lost.state, 1U) << rank;
    const bool had_no_room = rank == 1 && lost.awaited == static_cast<std::int32_t>(kRailRoom);
    EXPECT_TRUE(had_no_room || lost.awaited == static_cast<std::int32_t>(kAwaited[to_size(rank)])) << rank;
  }
  EXPECT_EQ(group.ranks().report(3).lost.peer, 0);
}

/// The call of one rank never begins.
TEST(NodesLost, SumsEndWhenARankOfTheNodeStaysAway) {
  NodeCalls group({.num_nodes = 3, .ranks_per_node = 2, .num_tokens = 60});
  constexpr int kAway = 3;
  group.ranks().delay(kAway, 2 * NodeRanks::kTimeoutNs);
  group.combine();
  ASSERT_EQ(group.ranks().run(), "");
  using enum cuda::Awaited;
  constexpr std::array kAwaited = {kEntry, kRailCall, kEntry, kRailCall, kEntry, kRailCall};
  for (int rank = 0; rank < group.ranks().num_ranks(); ++rank) {
    if (rank == kAway) continue;
    const cuda::LostReport& lost = group.ranks().report(rank).lost;
    EXPECT_EQ(lost.state, 1U) << rank;
    EXPECT_EQ(lost.awaited, static_cast<std::int32_t>(kAwaited[to_size(rank)])) << rank;
    EXPECT_EQ(lost.peer, rank % 2 == 1 ? kAway / 2 : kAway % 2) << rank;
  }
}

/// The clock stands still except for the delay, two of its steps, between which kernels read it.
TEST(NodesLate, ARankShowsInTheWaitsOfItsNodeAndItsRail) {
  constexpr std::uint64_t kLateNs = 20'000'000'000;
  for (const int late : {0, 3}) {
    NodeCalls group({.ranks_per_node = 2});
    ASSERT_EQ((group.dispatch(), group.combine(), group.ranks().run()), "");
    const auto wait_ns = [&group](int rank, int other) { return group.ranks().report(rank).waits.ns[other % 2]; };
    const auto rail_wait_ns = [&group](int rank, int node) { return group.ranks().report(rank).waits.rails_ns[node]; };
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(wait_ns(rank, 0) + wait_ns(rank, 1), 0U) << rank;
      EXPECT_EQ(rail_wait_ns(rank, 0) + rail_wait_ns(rank, 1), 0U) << rank;
    }
    const int neighbour = late ^ 1;
    const int rail_peer = (late + 2) % 4;
    for (std::uint64_t calls = 1; calls <= 2; ++calls) {
      group.ranks().delay(late, kLateNs);
      if (calls == 1) group.dispatch();
      if (calls == 2) group.combine();
      ASSERT_EQ(group.ranks().run(), "");
      EXPECT_GE(wait_ns(neighbour, late), calls * kLateNs);
      EXPECT_LT(wait_ns(neighbour, late), 3 * calls * kLateNs);
      EXPECT_EQ(wait_ns(neighbour, neighbour), 0U);
      EXPECT_EQ(wait_ns(late, late), 0U);
      EXPECT_EQ(wait_ns(late, neighbour), 0U);
      EXPECT_GE(rail_wait_ns(rail_peer, late / 2), calls * kLateNs / 2);
      EXPECT_LE(rail_wait_ns(rail_peer, late / 2), calls * kLateNs);
      EXPECT_EQ(rail_wait_ns(rail_peer, rail_peer / 2), 0U);
    }
  }
}

TEST(NodesOverlap, RowsAreTakenWhileOthersAreOnTheirWay) {
  // Two tokens per chunk. A rank alone in its node takes its rows afterwards.
  NodeCalls group({.ranks_per_node = 2, .num_experts = 4, .hidden = 200});
  const NodeCalls::Dispatched call = group.dispatch();
  constexpr int kCallAndFirstTokens = 2;
  group.ranks().cut_after(0, kCallAndFirstTokens);
  ASSERT_EQ(group.ranks().run(), "");
  // Rows arrive by source.
  EXPECT_TRUE(group.has_row(call, 2, 0));
  EXPECT_FALSE(group.has_row(call, 2, 2));
  EXPECT_EQ(group.ranks().report(2).lost.awaited, static_cast<std::int32_t>(cuda::Awaited::kRailItems));
}

}  // namespace
}  // namespace ferry::emulator
