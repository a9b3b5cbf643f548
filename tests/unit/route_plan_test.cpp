/// Route's arithmetic, compared with the oracle, which shares no code with it.

#include "plan/route_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/forward_table.hpp"
#include "support/planned_routing.hpp"
#include "support/random_world.hpp"

namespace ferry::test {
namespace {

void expect_equal(const oracle::RankRouting& planned, const oracle::RankRouting& expected) {
  EXPECT_EQ(planned.num_recv_rows, expected.num_recv_rows);
  EXPECT_EQ(planned.num_used_rows, expected.num_used_rows);
  EXPECT_EQ(planned.num_rows_per_local_expert, expected.num_rows_per_local_expert);
  EXPECT_EQ(planned.expert_row_offsets, expected.expert_row_offsets);
  EXPECT_EQ(planned.num_rows_from_rank, expected.num_rows_from_rank);
  EXPECT_EQ(planned.num_rows_to_rank, expected.num_rows_to_rank);
  EXPECT_EQ(planned.local_expert_ids, expected.local_expert_ids);
  EXPECT_EQ(planned.slots, expected.slots);
  EXPECT_EQ(planned.source, expected.source);
}

TEST(RoutePlan, GivesTheOraclesRows) {
  std::mt19937_64 random(7);
  for (int num_ranks : {1, 2, 3, 5, 8}) {
    for (int i = 0; i < 60; ++i) {
      const oracle::World world = make_world(draw_world_spec(random, num_ranks));
      const Result<std::vector<oracle::RankRouting>> expected = oracle::route(world);
      if (!expected.ok()) continue;  // too many rows on purpose
      const std::vector<oracle::RankRouting> planned = planned_routings(world);
      for (std::size_t rank = 0; rank < planned.size(); ++rank) {
        SCOPED_TRACE(testing::Message() << "world " << i << " of " << num_ranks << " ranks, rank " << rank);
        expect_equal(planned[rank], (*expected)[rank]);
      }
      if (HasFailure()) return;
    }
  }
}

using DestinationFields = std::tuple<int, std::int32_t, int, int>;

DestinationFields fields(const plan::Destination& d) { return {d.rank, d.row, d.topk, d.first}; }

/// The destinations of one token, from its slots.
std::vector<DestinationFields> sorted_destinations(const plan::RouteShape& shape, const std::int64_t* ids,
                                                   const std::int32_t* slots) {
  std::vector<DestinationFields> sorted;
  for (std::size_t topk = 0; topk < shape.num_topk; ++topk) {
    if (ids[topk] < 0) continue;
    sorted.emplace_back(static_cast<int>(shape.owner(to_size(ids[topk]))), slots[topk], static_cast<int>(topk), 1);
  }
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const auto& [rank, row, topk, first] = sorted[i - 1];
    if (std::get<0>(sorted[i]) == rank && std::get<1>(sorted[i]) == row) std::get<3>(sorted[i]) = 0;
  }
  return sorted;
}

// All widths of a token, experts on ranks in any order, and one plan's memory reused by the next.
TEST(RoutePlan, DestinationsAscendByRankAndRow) {
  std::mt19937 random(3);
  plan::TokenPlan tokens;
  for (std::size_t num_topk = 1; num_topk <= kMaxTopk; ++num_topk) {
    for (const Layout layout : {Layout::kTokens, Layout::kExperts}) {
      SCOPED_TRACE(testing::Message() << "K " << num_topk << ", layout " << static_cast<int>(layout));
      std::vector<std::int32_t> owners(40);
      for (std::int32_t& owner : owners) owner = static_cast<std::int32_t>(random() % 5);
      const plan::RouteShape shape{.layout = layout,
                                   .num_ranks = 5,
                                   .num_experts = owners.size(),
                                   .num_topk = num_topk,
                                   .expert_alignment = layout == Layout::kExperts ? 4 : 1,
                                   .slab_capacity = 0,
                                   .expert_to_rank = owners};
      std::vector<std::int64_t> ids(num_topk * (random() % 100));
      for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random() % (owners.size() + 1)) - 1;
      std::vector<std::int32_t> ranks(shape.num_ranks);
      std::vector<std::int32_t> experts(shape.num_experts);
      plan::count_tokens(shape, ids, ranks.data(), experts.data());
      const std::vector<plan::SourceCounts> sources(
          shape.num_ranks, {ranks.data(), experts.data(), static_cast<std::int64_t>(ids.size()), 0});
      const plan::ExpertGroups groups = plan::group_experts(shape, sources);
      tokens = plan::place_tokens(shape, sources, groups, 3, ids, std::move(tokens));
      ASSERT_EQ(tokens.first_destination.size(), ids.size() / num_topk + 1);
      EXPECT_EQ(tokens.num_rows_to_rank.size(), shape.num_ranks);
      for (std::size_t token = 0; token + 1 < tokens.first_destination.size(); ++token) {
        std::vector<DestinationFields> placed;
        for (auto i = tokens.first_destination[token]; i < tokens.first_destination[token + 1]; ++i) {
          placed.push_back(fields(tokens.destinations[to_size(i)]));
        }
        EXPECT_EQ(placed, sorted_destinations(shape, &ids[token * num_topk], &tokens.slots[token * num_topk]));
      }
      EXPECT_EQ(tokens.destinations.size(), to_size(tokens.first_destination.back()));
    }
  }
}

/// Two nodes of two ranks, with one expert each; three tokens with two entries.
struct TwoNodes {
  std::vector<std::int32_t> owners{0, 1, 2, 3};
  plan::RouteShape shape{.layout = Layout::kTokens,
                         .num_ranks = 4,
                         .num_experts = 4,
                         .num_topk = 2,
                         .expert_alignment = 1,
                         .slab_capacity = 0,
                         .expert_to_rank = owners};
  Topology topology{.rank = 0, .num_ranks = 4, .ranks_per_node = 2};
  std::vector<std::int64_t> ids{3, 2, -1, 1, 2, 2};
};

TEST(ForwardTables, HaveEachTokenOncePerNodeWithItsDestinationsThere) {
  const TwoNodes nodes;
  std::vector<std::int32_t> ranks(4);
  std::vector<std::int32_t> experts(4);
  plan::count_tokens(nodes.shape, nodes.ids, ranks.data(), experts.data());
  EXPECT_EQ(ranks, (std::vector<std::int32_t>{0, 1, 2, 1}));
  const std::vector<std::int32_t> none(4, 0);
  const std::vector<plan::SourceCounts> sources{{ranks.data(), experts.data(), 6, 0},
                                                {none.data(), none.data(), 0, 0},
                                                {none.data(), none.data(), 0, 0},
                                                {none.data(), none.data(), 0, 0}};
  const plan::ExpertGroups groups = plan::group_experts(nodes.shape, sources);
  const plan::TokenPlan tokens = plan::place_tokens(nodes.shape, sources, groups, 0, nodes.ids);
  const std::vector<plan::ForwardTable> tables = plan::build_forward_tables(tokens, nodes.topology);
  ASSERT_EQ(tables.size(), 2U);
  EXPECT_EQ(tables[0].tokens, (std::vector<std::int32_t>{1}));
  EXPECT_EQ(tables[1].tokens, (std::vector<std::int32_t>{0, 2}));
  const auto key = [](const plan::Destination& d) { return std::tuple(d.rank, d.row, d.topk, d.first); };
  const auto destinations = tables[1].destinations_of(0);
  ASSERT_EQ(destinations.size(), 2U);
  EXPECT_EQ(key(destinations[0]), std::tuple(0, 0, 1, 1));
  EXPECT_EQ(key(destinations[1]), std::tuple(1, 0, 0, 1));
  const auto duplicates = tables[1].destinations_of(1);
  ASSERT_EQ(duplicates.size(), 2U);
  EXPECT_EQ(key(duplicates[0]), std::tuple(0, 1, 0, 1));
  EXPECT_EQ(key(duplicates[1]), std::tuple(0, 1, 1, 0)) << "the same row again";

  std::vector<plan::ForwardTableSize> sizes(2);
  plan::count_forward_tables(nodes.shape, nodes.topology, nodes.ids, sizes.data());
  for (std::size_t node = 0; node < tables.size(); ++node) {
    EXPECT_EQ(sizes[node].num_items, tables[node].size().num_items);
    EXPECT_EQ(sizes[node].num_destinations, tables[node].size().num_destinations);
  }
}

TEST(ForwardTables, OfAnySizesHaveRoomNextToEachOther) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 1000; ++repeat) {
    const std::size_t num_tables = 1 + random() % 9;
    std::size_t used_bytes = 0;
    plan::ForwardTableSum sum;
    for (std::size_t table = 0; table < num_tables; ++table) {
      plan::ForwardTableSize size;
      size.num_items = static_cast<std::int32_t>(random() % 5);
      size.num_destinations = size.num_items * static_cast<std::int32_t>(1 + random() % 3);
      used_bytes += size.wire_bytes();
      sum.num_items += size.num_items;
      sum.num_destinations += size.num_destinations;
    }
    const std::size_t room_bytes = plan::forward_tables_bytes(num_tables, sum);
    EXPECT_GE(room_bytes, used_bytes);
    EXPECT_LT(room_bytes, used_bytes + num_tables * 16);
  }
}

}  // namespace
}  // namespace ferry::test
