/// Layers of any size: what is refused, what ends early, and that results stay as they are.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ferry/balance.hpp"
#include "support/sanitizers.hpp"

namespace ferry {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kHuge = std::int64_t{1} << 40;
constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();

BalanceOptions options_of(std::int64_t num_replicas, int num_ranks) {
  BalanceOptions options;
  options.num_replicas = num_replicas;
  options.num_ranks = num_ranks;
  return options;
}

ConstTensorView one_layer(const std::vector<float>& load) {
  return {load.data(), DType::kFloat32, {1, static_cast<std::int64_t>(load.size())}};
}

/// Loads of a layer in which the busiest experts have far more than the others.
std::vector<float> uneven_loads(std::size_t num_experts) {
  std::vector<float> load;
  for (std::size_t expert = 0; expert < num_experts; ++expert) load.push_back(1e6F / static_cast<float>(expert + 1));
  std::shuffle(load.begin(), load.end(), std::mt19937(11));
  return load;
}

std::string refusal(const Status& status) {
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
  return std::string(status.message());
}

TEST(BalanceSizes, AboveTheBoundsAreRefusedBeforeAnyMemoryIsTaken) {
  const std::vector<float> few(6, 1.0F);
  const auto refused = [&](std::int64_t num_layers, std::int64_t num_experts, const BalanceOptions& options) {
    return refusal(balance({few.data(), DType::kFloat32, {num_layers, num_experts}, {0, 0}}, options).status());
  };
  for (const std::int64_t num_layers : {kHuge, kHighest}) {
    EXPECT_THAT(refused(num_layers, 6, options_of(6, 1)), HasSubstr("load is 6 for each of"));
  }
  for (const std::int64_t num_experts : {kHuge, kHighest, kMaxBalanceExperts + 1}) {
    EXPECT_THAT(refused(1, num_experts, options_of(num_experts, 1)), HasSubstr("E from 1 to 262144"));
  }
  for (const std::int64_t num_replicas : {kHuge, kHighest, kMaxBalanceExperts + 1, std::int64_t{-1}}) {
    EXPECT_THAT(refused(1, 6, options_of(num_replicas, 1)), HasSubstr("expected 6 (the experts) to 262144"));
  }
  EXPECT_THAT(refused(1, 6, options_of(kMaxBalanceRanks + 1, kMaxBalanceRanks + 1)),
              HasSubstr("expected at most 4096"));
  // Twice the entries, although the loads are few.
  EXPECT_THAT(refused(kMaxBalanceEntries / 8, 6, options_of(16, 1)), HasSubstr("options.num_replicas is 16 for each"));
  EXPECT_THAT(refused(-1, 6, options_of(6, 1)), HasSubstr("load is [-1, 6]"));
}

TEST(BalanceSizes, ATableOfReplicasAboveTheBoundIsRefused) {
  // One expert gets all spare places, so each of the others has a row of that length.
  std::vector<float> load(1 << 14, 0.0F);
  load[0] = 1;
  EXPECT_THAT(refusal(balance(one_layer(load), options_of(1 << 18, 1)).status()),
              HasSubstr("the table of each expert's replicas is"));
}

TEST(BalanceSizes, PlansOfMovesHaveTheSameBounds) {
  const std::vector<std::int32_t> few(6, 0);
  const auto refused = [&](std::int64_t num_layers, std::int64_t num_places, const MovePlanOptions& options) {
    const ConstTensorView view(few.data(), DType::kInt32, {num_layers, num_places}, {0, 0});
    return refusal(plan_moves(view, view, options).status());
  };
  for (const std::int64_t num_layers : {kHuge, kHighest}) {
    EXPECT_THAT(refused(num_layers, 6, {6, 1, 1}), HasSubstr("previous is 6 for each of"));
  }
  for (const std::int64_t num_places : {kHuge, kHighest}) {
    EXPECT_THAT(refused(1, num_places, {6, 1, 1}), HasSubstr("P from 1 to 262144"));
  }
  for (const std::int64_t num_experts : {kHuge, kHighest, std::int64_t{-1}}) {
    EXPECT_THAT(refused(1, 6, {num_experts, 1, 1}), HasSubstr("options.num_experts is"));
  }
  EXPECT_THAT(refused(1 << 13, 1, {1 << 18, 1, 1}), HasSubstr("options.num_experts is 262144 for each of 8192"));
}

TEST(BalanceSizes, AProgramEndsTheCallBeforeItBegins) {
  const std::vector<float> load = uneven_loads(60);
  BalanceOptions options = options_of(60, 4);
  options.interrupted = [] { return true; };
  const Status status = balance(one_layer(load), options).status();
  EXPECT_EQ(status.code(), ErrorCode::kSystem);
  EXPECT_THAT(std::string(status.message()), HasSubstr("BalanceOptions::interrupted"));
}

/// Both take far longer than the interval between two questions if they are not ended.
TEST(BalanceSizes, AProgramEndsALongCallInTheMidst) {
  int asked = 0;
  const auto at_the_second_question = [&] { return ++asked == 2; };
  BalanceOptions options = options_of(66, 6);
  options.interrupted = at_the_second_question;
  const std::vector<float> load = uneven_loads(64);
  const ConstTensorView many_layers(load.data(), DType::kFloat32, {1 << 18, 64}, {0, 1});
  EXPECT_EQ(balance(many_layers, options).status().code(), ErrorCode::kSystem);
  EXPECT_EQ(asked, 2);

  // To match the parts of two placements on so many ranks takes longest.
  asked = 0;
  std::vector<std::int32_t> previous(kMaxBalanceExperts);
  for (std::size_t place = 0; place < previous.size(); ++place) {
    previous[place] = static_cast<std::int32_t>(place % (1 << 17));
  }
  std::shuffle(previous.begin(), previous.end(), std::mt19937(12));
  options = options_of(kMaxBalanceExperts, kMaxBalanceRanks);
  options.previous = ConstTensorView(previous.data(), DType::kInt32, {1, kMaxBalanceExperts});
  options.interrupted = at_the_second_question;
  EXPECT_EQ(balance(one_layer(uneven_loads(1 << 17)), options).status().code(), ErrorCode::kSystem);
  EXPECT_EQ(asked, 2);
}

/// Distinct (rank, expert) pairs that `now` has and `before` does not.
std::int64_t arrivals(const std::vector<std::int32_t>& before, const std::vector<std::int32_t>& now, int num_ranks) {
  const auto per_rank = static_cast<std::ptrdiff_t>(now.size()) / num_ranks;
  std::int64_t arrived = 0;
  for (std::ptrdiff_t first = 0; first < static_cast<std::ptrdiff_t>(now.size()); first += per_rank) {
    std::vector<std::int32_t> had(before.begin() + first, before.begin() + first + per_rank);
    std::vector<std::int32_t> has(now.begin() + first, now.begin() + first + per_rank);
    std::sort(had.begin(), had.end());
    std::sort(has.begin(), has.end());
    const auto last = std::unique(has.begin(), has.end());
    arrived += std::count_if(has.begin(), last,
                             [&](std::int32_t expert) { return !std::binary_search(had.begin(), had.end(), expert); });
  }
  return arrived;
}

TEST(BalanceSizes, LargeLayersArePlacedAndMovedWithinTheirLimits) {
  constexpr std::size_t kNumExperts = test::kSanitized ? 10'000 : 100'000;
  constexpr int kNumRanks = test::kSanitized ? 100 : 1'000;
  BalanceOptions options = options_of(static_cast<std::int64_t>(kNumExperts) + 10 * kNumRanks, kNumRanks);
  std::vector<float> load = uneven_loads(kNumExperts);
  const Balance placed = balance(one_layer(load), options).value();
  EXPECT_LE(placed.max_load[0], 1.001 * placed.mean_load[0]);
  EXPECT_EQ(*std::min_element(placed.replica_counts.begin(), placed.replica_counts.end()), 1);

  for (std::size_t expert = 0; expert < kNumExperts; ++expert) load[expert] *= expert % 2 == 0 ? 1.1F : 0.9F;
  options.previous = {placed.physical_to_logical.data(), DType::kInt32, {1, options.num_replicas}};
  options.max_moves = 50;
  const Balance moved = balance(one_layer(load), options).value();
  EXPECT_LE(moved.num_moves[0], 50);
  EXPECT_EQ(moved.num_moves[0], arrivals(placed.physical_to_logical, moved.physical_to_logical, kNumRanks));
}

/// Ranks that run different builds compute placements for themselves and have to agree, so a change of any result is a
/// change of the interface.
TEST(BalanceSizes, ResultsAreThoseOfEarlierBuilds) {
  constexpr std::array<std::array<int, 5>, 6> kShapes = {{{64, 72, 8, 1, 1},
                                                          {256, 288, 32, 4, 8},
                                                          {60, 60, 12, 1, 1},
                                                          {512, 640, 16, 1, 1},
                                                          {96, 192, 24, 2, 4},
                                                          {7, 24, 4, 1, 1}}};
  std::mt19937 random(29);
  std::uint64_t digest = 0;
  const auto add = [&](const Balance& placed) {
    constexpr std::uint64_t kMultiplier = 6364136223846793005;  // Knuth's, of MMIX
    for (const std::int32_t expert : placed.physical_to_logical) {
      digest = (digest + static_cast<std::uint64_t>(expert) + 1) * kMultiplier;
    }
  };
  for (int round = 0; round < 40; ++round) {
    for (const auto& [num_experts, num_places, num_ranks, num_nodes, num_groups] : kShapes) {
      BalanceOptions options = options_of(num_places, num_ranks);
      options.num_nodes = num_nodes;
      options.num_groups = num_groups;
      const auto draw = [&](int expert) {
        const auto load = static_cast<float>(random() % 1000);
        return round % 2 == 0 ? load : load * load / static_cast<float>(expert + 1);
      };
      std::vector<float> load;
      for (int expert = 0; expert < num_experts; ++expert) load.push_back(draw(expert));
      const Balance first = balance(one_layer(load), options).value();
      add(first);
      for (float& changed : load) changed += static_cast<float>(random() % 100);
      options.previous = {first.physical_to_logical.data(), DType::kInt32, {1, num_places}};
      options.max_moves = round % 3 == 0 ? -1 : round;
      options.move_weight = round % 5 == 0 ? 0.01 : 0;
      add(balance(one_layer(load), options).value());
    }
  }
  EXPECT_EQ(digest, 12582455105627963875U);
}

}  // namespace
}  // namespace ferry
