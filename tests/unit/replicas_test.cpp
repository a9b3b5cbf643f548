/// Home of an expert that a token picks, and checks of a placement.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ferry/placement.hpp"

namespace ferry {
namespace {

/// Homes that the tokens of a rank pick for expert `logical`.
std::vector<std::int32_t> picks(const Placement& placement, std::int64_t num_experts, const ReplicaPlace& place,
                                std::int32_t logical, std::int64_t num_tokens) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_tokens), logical);
  const TensorView view(ids.data(), DType::kInt32, {num_tokens, 1});
  const Status status = pick_replicas(view, num_experts, placement, place, view);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return ids;
}

using Ids = std::vector<std::int32_t>;

/// Eight physical experts on four ranks of two nodes. Expert 0 is on ranks 0, 1 and 3, expert 1 twice on rank 2.
Placement example() { return {.physical_to_logical = {0, 3, 2, 0, 1, 1, -1, 0}}; }

ReplicaPlace rank_of(int rank) { return {.rank = rank, .num_ranks = 4, .ranks_per_node = 2}; }

TEST(Replicas, AHomeOnTheOwnRankComesFirst) {
  EXPECT_EQ(picks(example(), 4, rank_of(0), 0, 3), (Ids{0, 0, 0}));
  EXPECT_EQ(picks(example(), 4, rank_of(1), 0, 3), (Ids{3, 3, 3}));
  EXPECT_EQ(picks(example(), 4, rank_of(3), 0, 3), (Ids{7, 7, 7}));
}

TEST(Replicas, ThenHomesOfTheOwnNode) { EXPECT_EQ(picks(example(), 4, rank_of(2), 0, 3), (Ids{7, 7, 7})); }

TEST(Replicas, SeveralThatAreEquallyNearTakeTurns) {
  EXPECT_EQ(picks(example(), 4, rank_of(2), 1, 4), (Ids{4, 5, 4, 5}));  // on the own rank
  EXPECT_EQ(picks(example(), 4, rank_of(3), 1, 4), (Ids{5, 4, 5, 4}));  // on the own node
  EXPECT_EQ(picks(example(), 4, rank_of(0), 1, 4), (Ids{4, 5, 4, 5}));  // elsewhere
  EXPECT_EQ(picks(example(), 4, rank_of(1), 1, 4), (Ids{5, 4, 5, 4}));
}

TEST(Replicas, RoundRobinTakesAllHomesWhereverTheyAre) {
  Placement placement = example();
  placement.choice = ReplicaChoice::kRoundRobin;
  EXPECT_EQ(picks(placement, 4, rank_of(0), 0, 5), (Ids{0, 3, 7, 0, 3}));
  EXPECT_EQ(picks(placement, 4, rank_of(1), 0, 5), (Ids{3, 7, 0, 3, 7}));
}

TEST(Replicas, ATokenPicksOneHomeInAllOfItsEntries) {
  Placement placement = example();
  placement.choice = ReplicaChoice::kRoundRobin;
  std::vector<std::int64_t> ids = {0, -1, 0, 1, 1, 0};
  std::vector<std::int64_t> out(ids.size());
  const Status status = pick_replicas(ConstTensorView(ids.data(), DType::kInt64, {2, 3}), 4, placement, rank_of(0),
                                      TensorView(out.data(), DType::kInt64, {2, 3}));
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(out, (std::vector<std::int64_t>{0, -1, 0, 5, 5, 3}));
}

TEST(Replicas, GivenRanksDecideWhatIsNear) {
  Placement placement = example();
  placement.physical_to_rank = {3, 0, 0, 1, 2, 0, 1, 2};
  EXPECT_EQ(picks(placement, 4, rank_of(0), 0, 2), (Ids{3, 3}));  // the only home on node 0
  EXPECT_EQ(picks(placement, 4, rank_of(0), 1, 2), (Ids{5, 5}));
}

TEST(Replicas, RanksWithOneTokenEachDoNotAllPickTheSameHome) {
  // 61 experts, of which the first three have two homes; one token on each of the 16 ranks of a node.
  Placement placement;
  for (std::int32_t expert = 0; expert < 64; ++expert) placement.physical_to_logical.push_back(expert % 61);
  std::vector<int> counts(64, 0);
  for (int rank = 0; rank < 16; ++rank) {
    const Ids picked = picks(placement, 61, {.rank = rank, .num_ranks = 16, .ranks_per_node = 16}, 0, 1);
    ++counts[static_cast<std::size_t>(picked[0])];
  }
  EXPECT_EQ(counts[0], 8);
  EXPECT_EQ(counts[61], 8);
}

std::string refusal(const Placement& placement, std::int64_t num_experts, int num_ranks) {
  return check_placement(placement, num_experts, num_ranks).to_string();
}

TEST(Replicas, PlacementsThatAreWrongAreRefused) {
  EXPECT_TRUE(check_placement(example(), 4, 4).ok());
  Placement placement = example();
  placement.physical_to_logical[1] = 2;
  EXPECT_NE(refusal(placement, 4, 4).find("no entry of physical_to_logical is expert 3"), std::string::npos);
  placement.physical_to_logical[1] = 4;
  EXPECT_NE(refusal(placement, 4, 4).find("physical_to_logical[1] is 4"), std::string::npos);
  EXPECT_NE(refusal(example(), 9, 4).find("8 physical experts, expected a home for each of 9"), std::string::npos);
  EXPECT_NE(refusal(example(), 0, 4).find("0 experts on 4 ranks"), std::string::npos);
  EXPECT_NE(refusal({}, 4, 4).find("0 physical experts"), std::string::npos);
}

/// Expert 1 has no home; there are fewer physical experts than experts.
Placement homeless() { return {.physical_to_logical = {0, 3, 2, 0}, .allow_homeless = true}; }

TEST(Homeless, AnExpertWithoutAHomeIsPickedAsNone) {
  EXPECT_TRUE(check_placement(homeless(), 5, 4).ok());
  for (const ReplicaChoice choice : {ReplicaChoice::kNearest, ReplicaChoice::kRoundRobin}) {
    Placement placement = homeless();
    placement.choice = choice;
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(picks(placement, 5, rank_of(rank), 1, 2), (Ids{-1, -1}));
      EXPECT_EQ(picks(placement, 5, rank_of(rank), 4, 2), (Ids{-1, -1}));
      EXPECT_EQ(picks(placement, 5, rank_of(rank), 3, 2), (Ids{1, 1}));
    }
  }
}

TEST(Homeless, MustBeAllowed) {
  Placement placement = homeless();
  placement.allow_homeless = false;
  EXPECT_NE(refusal(placement, 4, 4)
                .find("is expert 1, expected at least one home of each of 4 experts; add one, or "
                      "set allow_homeless"),
            std::string::npos);
  EXPECT_NE(refusal(placement, 5, 4).find("4 physical experts, expected a home for each of 5"), std::string::npos);
}

TEST(Homeless, OtherMistakesAreStillRefused) {
  Placement placement = homeless();
  placement.physical_to_logical[1] = 5;
  EXPECT_NE(refusal(placement, 5, 4).find("physical_to_logical[1] is 5"), std::string::npos);
  EXPECT_NE(refusal({.allow_homeless = true}, 5, 4).find("0 physical experts for 5 experts"), std::string::npos);
  EXPECT_NE(refusal(homeless(), std::int64_t{1} << 40, 4).find("4 physical experts for 1099511627776 experts"),
            std::string::npos);
}

TEST(Survivors, KeepTheirLocalExpertsInTheirOrder) {
  Placement placement = example();
  placement.physical_to_rank = {3, 0, 2, 1, 2, 0, 2, 1};
  placement.choice = ReplicaChoice::kRoundRobin;
  const std::vector<int> kept = {0, 2, 3};
  const Placement left = surviving_placement(placement, 4, 4, kept).value();
  EXPECT_EQ(left.physical_to_logical, (Ids{0, 3, 2, 1, 1, -1}));
  EXPECT_EQ(left.physical_to_rank, (Ids{2, 0, 1, 1, 0, 1}));
  EXPECT_EQ(left.choice, ReplicaChoice::kRoundRobin);
  EXPECT_TRUE(left.allow_homeless);
  EXPECT_TRUE(check_placement(left, 4, 3).ok());
  const std::vector<int> again = {2};  // rank 3 of the first placement
  const Placement last = surviving_placement(left, 4, 3, again).value();
  EXPECT_EQ(last.physical_to_logical, (Ids{0}));
  EXPECT_EQ(last.physical_to_rank, (Ids{0}));
}

TEST(Survivors, OfThePlacementByDefault) {
  const std::vector<int> kept = {0, 2};
  const Placement left = surviving_placement({}, 8, 3, kept).value();  // ranks have 2, 3 and 3
  EXPECT_EQ(left.physical_to_logical, (Ids{0, 1, 5, 6, 7}));
  EXPECT_EQ(left.physical_to_rank, (Ids{0, 0, 1, 1, 1}));
  const Placement whole = surviving_placement(example(), 4, 4, std::vector<int>{0, 1, 2, 3}).value();
  EXPECT_EQ(whole.physical_to_logical, example().physical_to_logical);
  EXPECT_EQ(whole.physical_to_rank, (Ids{0, 0, 1, 1, 2, 2, 3, 3}));
}

TEST(Survivors, WrongArgumentsAreRefused) {
  const auto words = [](const Placement& placement, std::int64_t num_experts, const std::vector<int>& kept) {
    const Status status = surviving_placement(placement, num_experts, 4, kept).status();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    return status.to_string();
  };
  const auto expect_words = [](const std::string& text, const char* expected) {
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  };
  expect_words(words(example(), 4, {}), "surviving_placement: kept_ranks is empty");
  expect_words(words(example(), 4, {0, 4}), "kept_ranks[1] is 4, expected a rank from 0 to 3");
  expect_words(words(example(), 4, {-1}), "kept_ranks[0] is -1");
  expect_words(words(example(), 4, {1, 1}), "kept_ranks[1] is 1, expected more than 1");
  expect_words(words(example(), 4, {2, 1}), "kept_ranks[1] is 1, expected more than 2");
  expect_words(words(example(), 3, {0}), "physical_to_logical[1] is 3");
  expect_words(words({}, 0, {0}), "0 experts on 4 ranks");
  expect_words(words({}, std::int64_t{1} << 40, {0}), "physical experts");
  expect_words(words({.physical_to_rank = {0, 1}}, 2, {0}), "0 physical experts");
  expect_words(words({}, 2, {0, 2}), "none of the 2 physical experts is on the 2 kept_ranks");  // on ranks 1 and 3
  Placement view;
  const std::int32_t table = 0;
  view.physical_to_logical_view = ConstTensorView(&table, DType::kInt32, {1});
  expect_words(words(view, 1, {0}), "physical_to_logical_view is given");
}

TEST(Replicas, ACallThatIsRefusedPicksNothing) {
  std::vector<std::int32_t> ids = {0, 3, 4};
  const TensorView view(ids.data(), DType::kInt32, {3, 1});
  const Status status = pick_replicas(view, 4, example(), rank_of(0), view);
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(status.message().find("topk_idx[2, 0] is 4"), std::string_view::npos) << status.to_string();
  EXPECT_EQ(ids, (std::vector<std::int32_t>{0, 3, 4}));
  EXPECT_EQ(pick_replicas(view, 4, example(), {.rank = 4, .num_ranks = 4, .ranks_per_node = 2}, view).code(),
            ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry
