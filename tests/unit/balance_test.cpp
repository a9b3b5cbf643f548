#include "ferry/balance.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "support/sanitizers.hpp"
#include "unit/balance_greedy.hpp"

namespace ferry {
namespace {

using testing::BalanceCase;
using ::testing::Each;
using ::testing::HasSubstr;

/// Token count of each expert of layer 0 of Qwen1.5-MoE-A2.7B while it answered questions, and the counts of the second
/// quarter of those tokens.
constexpr std::array<double, 60> kRecorded = {
    113, 161, 174, 212, 145, 119, 203, 181, 218, 161, 158, 162, 118, 150, 139, 171, 162, 110, 163, 167,
    229, 166, 168, 202, 171, 157, 176, 134, 132, 107, 174, 133, 132, 136, 166, 208, 123, 167, 215, 218,
    139, 192, 240, 169, 155, 181, 222, 150, 109, 186, 172, 110, 109, 126, 140, 161, 203, 192, 160, 119};
constexpr std::array<double, 60> kQuarter = {23, 50, 40, 43, 41, 30, 53, 31, 55, 28, 46, 54, 28, 47, 36,
                                             46, 44, 30, 29, 45, 57, 44, 52, 39, 35, 31, 44, 28, 32, 24,
                                             56, 50, 36, 35, 52, 55, 34, 34, 56, 45, 24, 47, 51, 42, 45,
                                             44, 53, 36, 37, 45, 41, 30, 18, 29, 44, 27, 64, 40, 44, 33};

std::vector<double> loads_of(const std::array<double, 60>& counts) { return {counts.begin(), counts.end()}; }

/// Sums in another order differ in their last bits.
constexpr double kRounding = 1 + 1e-12;

BalanceOptions options_of(const BalanceCase& in) {
  BalanceOptions options;
  options.num_replicas = in.num_replicas;
  options.num_groups = in.num_groups;
  options.num_nodes = in.num_nodes;
  options.num_ranks = in.num_ranks;
  return options;
}

Result<Balance> balance_loads(const std::vector<double>& load, std::int64_t num_experts,
                              const BalanceOptions& options) {
  const std::vector<float> values(load.begin(), load.end());
  return balance(ConstTensorView(values.data(), DType::kFloat32,
                                 {static_cast<std::int64_t>(load.size()) / num_experts, num_experts}),
                 options);
}

Balance balanced(const BalanceCase& in, const BalanceOptions& options) {
  return balance_loads(in.load, static_cast<std::int64_t>(in.load.size()), options).value();
}

ConstTensorView one_layer(const std::vector<std::int32_t>& placement) {
  return {placement.data(), DType::kInt32, {1, static_cast<std::int64_t>(placement.size())}};
}

/// Loads of the ranks under a placement of one layer.
std::vector<double> rank_loads(const BalanceCase& in, const std::vector<std::int32_t>& placement) {
  std::vector<int> counts(in.load.size(), 0);
  for (const std::int32_t expert : placement) ++counts[static_cast<std::size_t>(expert)];
  std::vector<double> loads(static_cast<std::size_t>(in.num_ranks), 0.0);
  const std::size_t places_per_rank = placement.size() / loads.size();
  for (std::size_t p = 0; p < placement.size(); ++p) {
    const auto expert = static_cast<std::size_t>(placement[p]);
    loads[p / places_per_rank] += in.load[expert] / counts[expert];
  }
  return loads;
}

double max_of(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

/// Number of (rank, expert) pairs of `after` that `before` does not have.
std::int64_t arrivals(const std::vector<std::int32_t>& before, const std::vector<std::int32_t>& after, int num_ranks) {
  const std::size_t places_per_rank = after.size() / static_cast<std::size_t>(num_ranks);
  std::set<std::pair<std::size_t, std::int32_t>> had;
  std::set<std::pair<std::size_t, std::int32_t>> came;
  for (std::size_t p = 0; p < before.size(); ++p) had.insert({p / places_per_rank, before[p]});
  for (std::size_t p = 0; p < after.size(); ++p) {
    if (had.count({p / places_per_rank, after[p]}) == 0) came.insert({p / places_per_rank, after[p]});
  }
  return static_cast<std::int64_t>(came.size());
}

/// Checks the properties of every placement of one layer.
void expect_valid(const BalanceCase& in, const Balance& placed) {
  ASSERT_EQ(placed.physical_to_logical.size(), static_cast<std::size_t>(in.num_replicas));
  std::vector<std::int32_t> counts(in.load.size(), 0);
  for (const std::int32_t expert : placed.physical_to_logical) {
    ASSERT_GE(expert, 0);
    ASSERT_LT(expert, static_cast<std::int32_t>(in.load.size()));
    ++counts[static_cast<std::size_t>(expert)];
  }
  ASSERT_EQ(std::count(counts.begin(), counts.end(), 0), 0) << "an expert has no replica";
  ASSERT_EQ(placed.replica_counts, counts);
  ASSERT_EQ(placed.max_replicas, *std::max_element(counts.begin(), counts.end()));
  const auto width = static_cast<std::size_t>(placed.max_replicas);
  ASSERT_EQ(placed.logical_to_physical.size(), in.load.size() * width);
  for (std::size_t expert = 0; expert < in.load.size(); ++expert) {
    for (std::size_t i = 0; i < width; ++i) {
      const std::int32_t physical = placed.logical_to_physical[expert * width + i];
      if (i >= static_cast<std::size_t>(counts[expert])) {
        ASSERT_EQ(physical, -1);
        continue;
      }
      ASSERT_EQ(placed.physical_to_logical[static_cast<std::size_t>(physical)], static_cast<std::int32_t>(expert));
      if (i > 0) {
        ASSERT_GT(physical, placed.logical_to_physical[expert * width + i - 1]);
      }
    }
  }
  const auto loads = rank_loads(in, placed.physical_to_logical);
  ASSERT_NEAR(placed.max_load[0], max_of(loads), 1e-9 * max_of(loads));
  ASSERT_NEAR(placed.mean_load[0], std::accumulate(loads.begin(), loads.end(), 0.0) / in.num_ranks,
              1e-9 * max_of(loads));
}

void expect_groups_on_nodes(const BalanceCase& in, const Balance& placed) {
  const std::size_t group_size = in.load.size() / static_cast<std::size_t>(in.num_groups);
  const auto places_per_node = static_cast<std::size_t>(in.num_replicas / in.num_nodes);
  std::vector<std::set<std::size_t>> nodes(static_cast<std::size_t>(in.num_groups));
  for (std::size_t p = 0; p < placed.physical_to_logical.size(); ++p) {
    nodes[static_cast<std::size_t>(placed.physical_to_logical[p]) / group_size].insert(p / places_per_node);
  }
  std::vector<int> groups_of_node(static_cast<std::size_t>(in.num_nodes), 0);
  for (const auto& homes : nodes) {
    ASSERT_EQ(homes.size(), 1U) << "a group is spread over nodes";
    ++groups_of_node[*homes.begin()];
  }
  ASSERT_THAT(groups_of_node, Each(in.num_groups / in.num_nodes));
}

bool shares_ranks(const Balance& placed) {
  const std::size_t places_per_rank = placed.physical_to_logical.size() / static_cast<std::size_t>(placed.num_ranks);
  std::set<std::pair<std::size_t, std::int32_t>> seen;
  for (std::size_t p = 0; p < placed.physical_to_logical.size(); ++p) {
    if (!seen.insert({p / places_per_rank, placed.physical_to_logical[p]}).second) return true;
  }
  return false;
}

/// Draws small shapes with loads from even to very uneven; half of them whole numbers, so that equal loads occur.
BalanceCase random_case(std::mt19937& random) {
  const auto pick = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  BalanceCase in;
  in.num_nodes = pick(1, 3);
  const int ranks_per_node = pick(1, 4);
  in.num_ranks = in.num_nodes * ranks_per_node;
  in.num_groups = pick(0, 3) == 0 ? pick(1, 4) : in.num_nodes * pick(1, 3);
  const int num_experts = in.num_groups * pick(1, 6);
  const int least_per_rank = (num_experts + in.num_ranks - 1) / in.num_ranks;
  in.num_replicas = in.num_ranks * (least_per_rank + pick(0, 3));
  const double skew = pick(0, 4);
  const bool whole = pick(0, 1) == 0;
  for (int e = 0; e < num_experts; ++e) {
    const double uniform = static_cast<double>(random()) / 4294967296.0;
    const double load = std::pow(uniform, skew) * 20;
    in.load.push_back(static_cast<double>(static_cast<float>(whole ? std::floor(load) : load)));
  }
  return in;
}

TEST(Balance, OnRandomLoadsNeverWorseThanGreedyAndAlwaysAPlacement) {
  constexpr int kNumCases = test::kSanitized ? 1'000 : 10'000;
  std::mt19937 random(17);
  int num_better = 0;
  for (int i = 0; i < kNumCases; ++i) {
    const BalanceCase in = random_case(random);
    const Balance placed = balanced(in, options_of(in));
    SCOPED_TRACE(i);
    ASSERT_NO_FATAL_FAILURE(expect_valid(in, placed));
    const bool hierarchical = in.num_groups % in.num_nodes == 0;
    ASSERT_EQ(placed.policy, hierarchical ? BalancePolicy::kHierarchical : BalancePolicy::kGlobal);
    if (hierarchical) {
      ASSERT_NO_FATAL_FAILURE(expect_groups_on_nodes(in, placed));
    }
    const double greedy = testing::greedy_max_load(in);
    ASSERT_LE(placed.max_load[0], greedy * kRounding);
    ASSERT_GE(placed.max_load[0] * kRounding, testing::max_load_bound(in));
    if (placed.max_load[0] < greedy * 0.999) ++num_better;
  }
  EXPECT_GT(num_better, kNumCases / 5) << "exchanging experts finds no improvement";
}

TEST(Balance, TheRecordedLoadsAreBalancedBetterThanByTheGreedyAlgorithm) {
  for (const int num_ranks : {4, 6, 10, 12}) {
    for (const int num_replicas : {60, 60 + 12 * num_ranks / (num_ranks == 10 ? 2 : 1)}) {
      const BalanceCase in{loads_of(kRecorded), num_replicas, 1, 1, num_ranks};
      const Balance placed = balanced(in, options_of(in));
      expect_valid(in, placed);
      EXPECT_LE(placed.max_load[0], testing::greedy_max_load(in) * kRounding);
      EXPECT_LE(placed.max_load[0], 1.005 * testing::max_load_bound(in)) << num_ranks << " ranks, " << num_replicas;
      EXPECT_FALSE(shares_ranks(placed));
    }
  }
}

/// Size of DeepSeek-V3's layers, with a load that falls as 1/rank.
TEST(Balance, LargeLayersComeCloseToTheBound) {
  std::mt19937 random(3);
  BalanceCase in{{}, 288, 8, 1, 32};
  for (int e = 0; e < 256; ++e) in.load.push_back(std::floor(1e6 / (e + 1)));
  std::shuffle(in.load.begin(), in.load.end(), random);
  const Balance placed = balanced(in, options_of(in));
  expect_valid(in, placed);
  EXPECT_LE(placed.max_load[0], 1.001 * testing::max_load_bound(in));
  EXPECT_FALSE(shares_ranks(placed));
}

TEST(Balance, ReplicasStayApartWhereTheyCan) {
  // One expert has nearly all tokens: more replicas than ranks would make each replica lighter, but not its ranks.
  const BalanceCase hot{{1000, 10, 9, 8, 7, 6}, 12, 1, 1, 4};
  const Balance placed = balanced(hot, options_of(hot));
  EXPECT_EQ(placed.replica_counts[0], 4);
  EXPECT_FALSE(shares_ranks(placed));
  const BalanceCase idle{std::vector<double>(6, 0.0), 12, 1, 1, 4};
  EXPECT_FALSE(shares_ranks(balanced(idle, options_of(idle))));
  EXPECT_EQ(balanced(idle, options_of(idle)).replica_counts, std::vector<std::int32_t>(6, 2));
  // Replicas share a rank if separating them would cost load: 60 here, at least 65 with expert 0 on both ranks.
  const BalanceCase costly{{60, 50, 10}, 4, 1, 1, 2};
  EXPECT_EQ(balanced(costly, options_of(costly)).max_load[0], 60);
  // Two experts, three places on each of two ranks.
  const BalanceCase crowded{{3, 1}, 6, 1, 1, 2};
  EXPECT_NO_FATAL_FAILURE(expect_valid(crowded, balanced(crowded, options_of(crowded))));
}

TEST(Balance, EveryLayerIsPlacedByItself) {
  std::vector<double> load = loads_of(kRecorded);
  load.insert(load.end(), kQuarter.begin(), kQuarter.end());
  const BalanceCase first{loads_of(kRecorded), 72, 1, 1, 12};
  const BalanceCase second{loads_of(kQuarter), 72, 1, 1, 12};
  const Balance both = balance_loads(load, 60, options_of(first)).value();
  std::vector<std::int32_t> expected = balanced(first, options_of(first)).physical_to_logical;
  const Balance alone = balanced(second, options_of(second));
  expected.insert(expected.end(), alone.physical_to_logical.begin(), alone.physical_to_logical.end());
  EXPECT_EQ(both.num_layers, 2);
  EXPECT_EQ(both.physical_to_logical, expected);
  EXPECT_EQ(both.max_load[1], alone.max_load[0]);
  const Balance none = balance(ConstTensorView(nullptr, DType::kInt32, {0, 60}), options_of(first)).value();
  EXPECT_TRUE(none.physical_to_logical.empty());
}

TEST(Balance, LoadsMayHaveAnyStridesAndWholeNumbers) {
  const BalanceCase in{loads_of(kRecorded), 72, 1, 1, 12};
  std::vector<std::int64_t> spread(60 * 3, -1);
  for (std::size_t e = 0; e < 60; ++e) spread[e * 3] = static_cast<std::int64_t>(kRecorded[e]);
  const Balance placed =
      balance(ConstTensorView(spread.data(), DType::kInt64, {1, 60}, {7, 3}), options_of(in)).value();
  EXPECT_EQ(placed.physical_to_logical, balanced(in, options_of(in)).physical_to_logical);
}

TEST(Balance, AnUnchangedLoadMovesNothing) {
  for (const int num_groups : {1, 4}) {
    const BalanceCase in{loads_of(kRecorded), 72, num_groups, 4, 12};
    BalanceOptions options = options_of(in);
    const Balance first = balanced(in, options);
    options.previous = one_layer(first.physical_to_logical);
    const Balance again = balanced(in, options);
    EXPECT_EQ(again.physical_to_logical, first.physical_to_logical);
    EXPECT_EQ(again.num_moves[0], 0);
  }
}

TEST(Balance, MovesAreCountedLimitedAndWeighed) {
  const BalanceCase before{loads_of(kRecorded), 72, 4, 2, 12};
  const BalanceCase now{loads_of(kQuarter), 72, 4, 2, 12};
  BalanceOptions options = options_of(now);
  const std::vector<std::int32_t> previous = balanced(before, options).physical_to_logical;
  const Balance free = balanced(now, options);
  options.previous = one_layer(previous);
  const double stay = max_of(rank_loads(now, previous));

  const Balance any = balanced(now, options);
  expect_valid(now, any);
  EXPECT_EQ(any.num_moves[0], arrivals(previous, any.physical_to_logical, 12));
  EXPECT_LE(any.num_moves[0], arrivals(previous, free.physical_to_logical, 12));
  EXPECT_LE(any.max_load[0], testing::greedy_max_load(now) * kRounding);

  double last = stay;
  for (const int max_moves : {0, 2, 5, 10}) {
    options.max_moves = max_moves;
    const Balance limited = balanced(now, options);
    expect_valid(now, limited);
    expect_groups_on_nodes(now, limited);
    EXPECT_EQ(limited.num_moves[0], arrivals(previous, limited.physical_to_logical, 12));
    EXPECT_LE(limited.num_moves[0], max_moves);
    EXPECT_LE(limited.max_load[0], last * kRounding) << max_moves;
    last = limited.max_load[0];
    if (max_moves == 0) {
      EXPECT_EQ(limited.physical_to_logical, previous);
    }
  }
  EXPECT_LT(last, stay);

  options.max_moves = -1;
  options.move_weight = 0.01;
  const Balance weighed = balanced(now, options);
  EXPECT_LT(weighed.num_moves[0], any.num_moves[0]);
  EXPECT_LE(weighed.max_load[0] + 0.01 * weighed.mean_load[0] * static_cast<double>(weighed.num_moves[0]),
            stay * kRounding);
  options.move_weight = 10;
  EXPECT_EQ(balanced(now, options).physical_to_logical, previous);
}

TEST(Balance, WhatStaysOnItsRankStaysInItsPlace) {
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    BalanceCase in = random_case(random);
    BalanceOptions options = options_of(in);
    const std::vector<std::int32_t> previous = balanced(in, options).physical_to_logical;
    for (double& load : in.load) load = std::floor(load * static_cast<double>(random() % 3));
    options.previous = one_layer(previous);
    const Balance placed = balanced(in, options);
    SCOPED_TRACE(i);
    ASSERT_NO_FATAL_FAILURE(expect_valid(in, placed));
    ASSERT_LE(placed.max_load[0], testing::greedy_max_load(in) * kRounding);
    ASSERT_EQ(placed.num_moves[0], arrivals(previous, placed.physical_to_logical, in.num_ranks));
    const std::size_t per_rank = previous.size() / static_cast<std::size_t>(in.num_ranks);
    for (std::size_t p = 0; p < previous.size(); ++p) {
      const auto first = placed.physical_to_logical.begin() + static_cast<std::ptrdiff_t>(p - p % per_rank);
      if (placed.physical_to_logical[p] == previous[p]) continue;
      // The expert in a changed place is new on this rank, or has more replicas on it than before.
      const auto old = previous.begin() + static_cast<std::ptrdiff_t>(p - p % per_rank);
      const auto last = static_cast<std::ptrdiff_t>(per_rank);
      const std::int32_t expert = placed.physical_to_logical[p];
      ASSERT_LT(std::count(old, old + last, expert), std::count(first, first + last, expert));
    }
  }
}

TEST(Balance, APreviousPlacementMayHaveEmptyPlacesOrBreakThePolicy) {
  const BalanceCase in{{5, 4, 3, 2}, 8, 2, 2, 4};
  BalanceOptions options = options_of(in);
  options.max_moves = 4;
  const std::vector<std::int32_t> half_empty = {0, -1, 1, -1, 2, -1, 3, -1};
  options.previous = one_layer(half_empty);
  const Balance filled = balanced(in, options);
  expect_valid(in, filled);
  expect_groups_on_nodes(in, filled);
  EXPECT_EQ(filled.num_moves[0], arrivals(half_empty, filled.physical_to_logical, 4));
  EXPECT_LE(filled.num_moves[0], 4);
  options.max_moves = 0;
  for (const std::vector<std::int32_t>& broken :
       {std::vector<std::int32_t>{0, 2, 0, 2, 1, 3, 1, 3}, std::vector<std::int32_t>{0, 0, 1, 1, 2, 2, 2, 2}}) {
    options.previous = one_layer(broken);
    const Balance repaired = balanced(in, options);
    expect_valid(in, repaired);
    expect_groups_on_nodes(in, repaired);
    EXPECT_EQ(repaired.num_moves[0], arrivals(broken, repaired.physical_to_logical, 4));
  }
}

TEST(Balance, BadArgumentsAreRefusedInWords) {
  const BalanceCase good{{1, 2, 3, 4, 5, 6}, 8, 2, 2, 4};
  struct Case {
    const char* mentions;
    BalanceOptions options;
  };
  const auto with = [&](auto change) {
    BalanceOptions options = options_of(good);
    change(options);
    return options;
  };
  const std::vector<std::int32_t> short_placement(6, 0);
  std::vector<std::int32_t> wrong_id = {0, 1, 2, 3, 4, 5, 6, 0};
  const std::vector<Case> cases = {
      {"options.num_replicas is 4, expected 6", with([](auto& o) { o.num_replicas = 4; })},
      {"options.num_ranks is 3, expected a divisor of the 8", with([](auto& o) { o.num_ranks = 3; })},
      {"options.num_ranks is 0", with([](auto& o) { o.num_ranks = 0; })},
      {"options.num_nodes is 3, expected a divisor of the 4 ranks", with([](auto& o) { o.num_nodes = 3; })},
      {"options.num_groups is 4, expected a divisor of the 6 experts", with([](auto& o) { o.num_groups = 4; })},
      {"options.num_groups is 3, expected a multiple of the 2 nodes", with([](auto& o) {
         o.num_groups = 3;
         o.policy = BalancePolicy::kHierarchical;
       })},
      {"options.policy is 9", with([](auto& o) { o.policy = static_cast<BalancePolicy>(9); })},
      {"options.max_moves is -2", with([](auto& o) { o.max_moves = -2; })},
      {"options.move_weight is -1", with([](auto& o) { o.move_weight = -1; })},
      {"options.max_steps is -1", with([](auto& o) { o.max_steps = -1; })},
      {"options.previous is [1, 6], expected [1, 8]", with([&](auto& o) { o.previous = one_layer(short_placement); })},
      {"options.previous[0, 6] is 6", with([&](auto& o) { o.previous = one_layer(wrong_id); })},
  };
  for (const Case& bad : cases) {
    const Status status = balance_loads(good.load, 6, bad.options).status();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << bad.mentions;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.mentions));
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {-1.0F, nan, infinity}) {
    const std::vector<double> load = {1, 2, 3, 4, static_cast<double>(bad), 6};
    EXPECT_THAT(std::string(balance_loads(load, 6, options_of(good)).status().message()), HasSubstr("load[0, 4] is"));
  }
  const std::vector<float> six(6, 1.0F);
  const auto message = [&](const ConstTensorView& load) {
    const auto result = balance(load, options_of(good));
    EXPECT_EQ(result.status().code(), ErrorCode::kInvalidArgument);
    return std::string(result.status().message());
  };
  EXPECT_THAT(message({}), HasSubstr("load is absent"));
  EXPECT_THAT(message({six.data(), DType::kFloat32, {6}}), HasSubstr("load is [6], expected [layers, E]"));
  EXPECT_THAT(message({six.data(), DType::kFloat16, {1, 6}}), HasSubstr("load is f16"));
  EXPECT_THAT(message({nullptr, DType::kFloat32, {1, 6}}), HasSubstr("load is a null pointer"));
}

}  // namespace
}  // namespace ferry
