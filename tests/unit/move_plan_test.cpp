#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ferry/balance.hpp"

namespace ferry {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Placement = std::vector<std::int32_t>;

struct World {
  std::int64_t num_experts = 0;
  int num_ranks = 1;
  int num_nodes = 1;
};

Result<MovePlan> plan(const Placement& previous, const Placement& next, const World& world,
                      std::int64_t num_layers = 1) {
  const auto view = [num_layers](const Placement& placement) {
    const auto num_physical = static_cast<std::int64_t>(placement.size()) / num_layers;
    return ConstTensorView(placement.data(), DType::kInt32, {num_layers, num_physical});
  };
  return plan_moves(view(previous), view(next), {world.num_experts, world.num_ranks, world.num_nodes});
}

/// Carries the plan out wave by wave, with each wave's copies in random order, on experts that are numbers. Places that
/// a wave writes hold garbage for every copy of that wave that reads them.
Placement carry_out(const MovePlan& moves, const Placement& previous, const World& world, std::int64_t num_layers,
                    std::mt19937& random) {
  Placement now = previous;
  const std::size_t per_layer = previous.size() / static_cast<std::size_t>(num_layers);
  const std::size_t per_rank = per_layer / static_cast<std::size_t>(world.num_ranks);
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> staging;  // by rank and staging place
  for (std::size_t wave = 0; wave + 1 < moves.wave_begin.size(); ++wave) {
    std::vector<ExpertCopy> copies(moves.copies.begin() + moves.wave_begin[wave],
                                   moves.copies.begin() + moves.wave_begin[wave + 1]);
    std::shuffle(copies.begin(), copies.end(), random);
    for (const ExpertCopy& copy : copies) {
      const auto base = static_cast<std::size_t>(copy.layer) * per_layer;
      std::int32_t content = -1;
      if (copy.from_staging) {
        content = staging.at({copy.from_rank, copy.from});
      } else {
        EXPECT_EQ(static_cast<std::size_t>(copy.from) / per_rank, static_cast<std::size_t>(copy.from_rank));
        content = now[base + static_cast<std::size_t>(copy.from)];
      }
      EXPECT_EQ(content, copy.expert) << "overwritten before it was read";
      if (copy.to_staging) {
        EXPECT_LT(copy.to, moves.num_staging[static_cast<std::size_t>(copy.to_rank)]);
        staging[{copy.to_rank, copy.to}] = content;
      } else {
        EXPECT_EQ(static_cast<std::size_t>(copy.to) / per_rank, static_cast<std::size_t>(copy.to_rank));
        now[base + static_cast<std::size_t>(copy.to)] = content;
      }
    }
  }
  return now;
}

TEST(MovePlan, CarriedOutInAnyOrderOfAWaveItGivesTheNextPlacement) {
  std::mt19937 random(23);
  for (int i = 0; i < 2'000; ++i) {
    const World world{1 + static_cast<int>(random() % 6), 1 + static_cast<int>(random() % 4), 1};
    const std::size_t num_physical = static_cast<std::size_t>(world.num_ranks) * (1 + random() % 4);
    constexpr std::int64_t kNumLayers = 2;
    Placement previous(num_physical * kNumLayers);
    Placement next(previous.size());
    for (auto& expert : previous)
      expert = static_cast<std::int32_t>(random() % static_cast<unsigned>(world.num_experts));
    for (std::size_t p = 0; p < next.size(); ++p) {
      // Any expert of the layer, or an unchanged place.
      const std::size_t base = p / num_physical * num_physical;
      next[p] = random() % 8 == 0 ? -1 : previous[base + random() % num_physical];
    }
    const MovePlan moves = plan(previous, next, world, kNumLayers).value();
    Placement expected = next;
    for (std::size_t p = 0; p < next.size(); ++p) {
      if (expected[p] < 0) expected[p] = previous[p];
    }
    SCOPED_TRACE(i);
    ASSERT_EQ(carry_out(moves, previous, world, kNumLayers, random), expected);
    ASSERT_EQ(moves.num_remote + moves.num_local, static_cast<std::int64_t>(moves.copies.size()));
  }
}

TEST(MovePlan, NothingToDoIsAnEmptyPlan) {
  const Placement placement = {0, 1, 2, 3};
  const MovePlan moves = plan(placement, placement, {4, 2, 1}).value();
  EXPECT_TRUE(moves.copies.empty());
  EXPECT_THAT(moves.wave_begin, ElementsAre(0));
  EXPECT_THAT(moves.num_staging, ElementsAre(0, 0));
}

TEST(MovePlan, TwoExpertsThatChangePlacesTakeOneStagingPlace) {
  const MovePlan moves = plan({0, 1, 2, 3}, {0, 2, 1, 3}, {4, 2, 1}).value();
  ASSERT_EQ(moves.copies.size(), 3U);
  EXPECT_TRUE(moves.copies[0].to_staging);
  EXPECT_TRUE(moves.copies[0].local());
  EXPECT_EQ(moves.num_remote, 2);
  EXPECT_EQ(moves.num_local, 1);
  EXPECT_THAT(moves.wave_begin, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(moves.num_staging, ElementsAre(1, 0));
}

TEST(MovePlan, SourcesAreNearAndTakeTurns) {
  // Expert 0 is on ranks 0 (node 0) and 2 (node 1); the others get it from their own node, or their own rank.
  const MovePlan near = plan({0, 1, 2, 3, 0, 4, 5, 6}, {0, 0, 0, 3, 0, 4, 0, 6}, {7, 4, 2}).value();
  std::map<std::int32_t, std::int32_t> source;
  for (const ExpertCopy& copy : near.copies) source[copy.to] = copy.from;
  EXPECT_EQ(source, (std::map<std::int32_t, std::int32_t>{{1, 0}, {2, 0}, {6, 4}}));
  EXPECT_EQ(near.num_between_nodes, 0);
  EXPECT_EQ(near.num_local, 1);
  EXPECT_EQ(near.num_remote, 2);
  // Experts 0 and 1 are on both of ranks 0 and 1, and both go to rank 2: one from each.
  const MovePlan turns = plan({0, 1, 0, 1, 2, 3}, {0, 1, 0, 1, 0, 1}, {4, 3, 1}).value();
  ASSERT_EQ(turns.copies.size(), 2U);
  EXPECT_NE(turns.copies[0].from_rank, turns.copies[1].from_rank);
  EXPECT_THAT(turns.wave_begin, ElementsAre(0, 2));
}

TEST(MovePlan, BadArgumentsAreRefusedInWords) {
  const auto message = [](const Placement& previous, const Placement& next, const World& world) {
    const auto moves = plan(previous, next, world);
    EXPECT_EQ(moves.status().code(), ErrorCode::kInvalidArgument);
    return std::string(moves.status().message());
  };
  EXPECT_THAT(message({0, 1}, {0, 2}, {3, 2, 1}), HasSubstr("next[0, 1] is 2, expected an expert that previous has"));
  EXPECT_THAT(message({0, 1}, {0, 3}, {3, 2, 1}), HasSubstr("next[0, 1] is 3, expected -1"));
  EXPECT_THAT(message({0, 1}, {0, 1, 1}, {3, 2, 1}), HasSubstr("next is [1, 3], expected [1, 2]"));
  EXPECT_THAT(message({0, 1, 2}, {0, 1, 2}, {3, 2, 1}), HasSubstr("options.num_ranks is 2"));
  EXPECT_THAT(message({0, 1}, {0, 1}, {3, 2, 3}), HasSubstr("options.num_nodes is 3"));
  EXPECT_THAT(message({0, 1}, {0, 1}, {0, 2, 1}), HasSubstr("options.num_experts is 0"));
}

}  // namespace
}  // namespace ferry
