#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "unit/oracle_worlds.hpp"

// Oracle's functions for latency mode alone. Every expectation is computed by hand.

namespace ferry::oracle {
namespace {

TEST(OracleRoute, SourceRangesOfASlab) {
  World world = two_ranks(Layout::kSlab);
  world.options.slab_capacity = 4;
  const auto routings = route(world).value();
  // Expert 0: token 0 of each rank; expert 1: token 2 of rank 0, token 0 of rank 1.
  EXPECT_EQ(source_ranges(world, routings[0]), (std::vector<SourceRange>{{1, 0}, {1, 1}, {1, 0}, {1, 1}}));
  // Rank 1 has no token for experts 2 and 3.
  EXPECT_EQ(source_ranges(world, routings[1]), (std::vector<SourceRange>{{1, 0}, {0, 1}, {1, 0}, {0, 1}}));
}

/// One token of rank 0 with two entries on each rank, for different experts or, with `repeats`, twice for one.
World two_entries_on_each(int num_ranks, int ranks_per_node, bool repeats = false) {
  World world;
  world.num_ranks = num_ranks;
  world.ranks_per_node = ranks_per_node;
  world.num_topk = 2 * num_ranks;
  world.options.num_experts = 2 * num_ranks;
  world.options.layout = Layout::kSlab;
  world.options.slab_capacity = 1;
  world.ranks.resize(static_cast<std::size_t>(num_ranks));
  world.ranks[0].num_tokens = 1;
  for (int k = 0; k < 2 * num_ranks; ++k) {
    world.ranks[0].topk_idx.push_back(repeats ? k / 2 * 2 : k);
    world.ranks[0].topk_weights.push_back(1.0F);
  }
  return world;
}

/// Rows of one block, whose first channel makes the scale 1 where both of a rank's rows are added; the second is given.
Bytes block_row(float value) {
  std::vector<float> row(128, 0.0F);
  row[0] = 224;
  row[1] = value;
  return pack_bf16(row);
}

/// Second channel of the sum of such rows, two on each rank, whose ranks' sums travel as FP8.
Bytes combine_fp8_sums(const World& world, const std::vector<float>& y) {
  CombineInputs inputs;
  inputs.hidden = 128;
  inputs.weighted = true;
  inputs.order = CombineOrder::kRankSums;
  inputs.wire_format = WireFormat::kFp8;
  for (std::size_t rank = 0; rank < y.size() / 2; ++rank) {
    Bytes rows = block_row(y[2 * rank]);
    const Bytes second = block_row(y[2 * rank + 1]);
    rows.insert(rows.end(), second.begin(), second.end());
    inputs.x.push_back(std::move(rows));
  }
  const Bytes sum = combine(world, route(world).value(), inputs)[0].x;
  return {sum.begin() + 2, sum.begin() + 4};
}

/// bf16 values of the rows, two on each rank.
Bytes combine_rank_sums(const World& world, const std::vector<float>& y) {
  CombineInputs inputs;
  inputs.hidden = 1;
  inputs.weighted = true;
  inputs.order = CombineOrder::kRankSums;
  for (std::size_t rank = 0; rank < y.size() / 2; ++rank) inputs.x.push_back(pack_bf16({y[2 * rank], y[2 * rank + 1]}));
  return combine(world, route(world).value(), inputs)[0].x;
}

// bf16 has 8 significant bits: 1 + 2^-8 loses its last bit, 1 + 2^-7 loses none.
TEST(OracleCombine, RankSumsAreRoundedOnEachRankAndOnceMore) {
  const World world = two_entries_on_each(2, 2);
  EXPECT_EQ(combine_rank_sums(world, {1, 0x1p-8F, 0x1p-8F, 0}), pack_bf16({1})) << "(1) + (2^-8), to even";
  EXPECT_EQ(combine_rank_sums(world, {1, 0, 0x1p-8F, 0x1p-8F}), pack_bf16({1 + 0x1p-7F})) << "(1) + (2^-7)";
  EXPECT_EQ(combine_rank_sums(world, {1, 0x1p-9F, 0x1.8p-8F, 0}), pack_bf16({1 + 0x1p-7F})) << "(1) + 1.5 * 2^-8";

  CombineInputs exact;
  exact.hidden = 1;
  exact.weighted = true;
  exact.x = {pack_bf16({1, 0x1p-8F}), pack_bf16({0x1p-8F, 0})};
  EXPECT_EQ(combine(world, route(world).value(), exact)[0].x, pack_bf16({1 + 0x1p-7F})) << "the other order";
}

TEST(OracleCombine, RankSumsAddRanksInAscendingOrderInFp32) {
  World world = two_entries_on_each(3, 3);
  // The entries' order differs from the order of their ranks.
  world.ranks[0].topk_idx = {4, 2, 0, 5, 3, 1};
  const float big = 0x1p24F;
  EXPECT_EQ(combine_rank_sums(world, {1, 0, 1, 0, big, 0}), pack_bf16({big}));
  CombineInputs inputs;
  inputs.dtype = DType::kFloat32;
  inputs.hidden = 1;
  inputs.weighted = true;
  inputs.order = CombineOrder::kRankSums;
  inputs.x = {pack({1, 0}), pack({1, 0}), pack({big, 0})};
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x)[0], big + 2);
  inputs.x = {pack({big, 0}), pack({1, 0}), pack({1, 0})};
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x)[0], big);
  inputs.x = {pack({big, 0}), pack({1, 1}), pack({0, 0})};
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x)[0], big + 2) << "a rank's sum comes first";
}

TEST(OracleCombine, RankSumsWeighEachEntryWithOneRounding) {
  World world = two_entries_on_each(1, 1);
  world.ranks[0].topk_weights = {1 + 0x1p-12F, 1.0F};
  CombineInputs inputs;
  inputs.dtype = DType::kFloat32;
  inputs.hidden = 1;
  inputs.weighted = true;
  inputs.order = CombineOrder::kRankSums;
  inputs.x = {pack({-1.0F, 1 + 0x1p-12F})};
  // The first row is added before the second: -(1 + 2^-12) + (1 + 2^-12).
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x)[0], 0.0F);
  inputs.x = {pack({1 + 0x1p-12F, -1.0F})};
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x)[0], 0x1p-11F) << "(1 + 2^-11 + 2^-24) rounded";
  world.ranks[0].topk_idx = {1, 0};
  inputs.x = {pack({-1.0F, 1 + 0x1p-12F})};
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x)[0], 0x1p-11F + 0x1p-24F);
}

TEST(OracleCombine, RankSumsOfAnExpertNamedTwice) {
  World world = two_entries_on_each(2, 2, true);
  world.ranks[0].topk_weights = {1.0F, 0x1p-8F, 0x1p-8F, 0.0F};
  EXPECT_EQ(combine_rank_sums(world, {1, 99, 1, 99}), pack_bf16({1})) << "(1 + 2^-8, rounded) + (2^-8)";
}

TEST(OracleCombine, RankSumsOverNodesRoundOnceMorePerNode) {
  // Node 0 adds (1) + (2^-8), which it rounds to 1; then the source adds node 1's 2^-8.
  EXPECT_EQ(combine_rank_sums(two_entries_on_each(4, 4), {1, 0, 0x1p-8F, 0, 0x1p-8F, 0, 0, 0}),
            pack_bf16({1 + 0x1p-7F}));
  EXPECT_EQ(combine_rank_sums(two_entries_on_each(4, 2), {1, 0, 0x1p-8F, 0, 0x1p-8F, 0, 0, 0}), pack_bf16({1}));
  // One rank per node: its sum is rounded, and the node's is the same.
  EXPECT_EQ(combine_rank_sums(two_entries_on_each(2, 1), {1, 0x1p-8F, 0x1p-8F, 0}), pack_bf16({1}));
}

// E4M3 has 4 significant bits: with a scale of 1 its numbers from 16 to 32 are 2 apart, those from 32 to 64 are 4.
TEST(OracleCombine, Fp8SumsAreQuantisedOncePerRankAndNotRoundedBefore) {
  const World world = two_entries_on_each(2, 2);
  EXPECT_EQ(combine_fp8_sums(world, {8.5F, 8.5F, 9.5F, 9.5F}), pack_bf16({16 + 20})) << "17 and 19, to even codes";
  EXPECT_EQ(combine_fp8_sums(world, {8.5F, 8.5F, 0, 0}), pack_bf16({16})) << "rows of rank 1 have no second channel";
  EXPECT_EQ(combine_fp8_sums(world, {-8.5F, -9, 3.25F, 0.0625F}), pack_bf16({-18 + 3.25F})) << "-17.5, 3.3125";
  // 17 + 2^-8 is 17 in bf16, which would become 16.
  EXPECT_EQ(combine_fp8_sums(world, {17, 0x1p-8F, 0, 0}), pack_bf16({18}));
}

TEST(OracleCombine, Fp8SumsAreOfWeightedRows) {
  World world = two_entries_on_each(1, 1);
  world.ranks[0].topk_weights = {0.5F, 1.5F};
  EXPECT_EQ(combine_fp8_sums(world, {20, 6}), pack_bf16({20})) << "10 + 9, to 20";
}

TEST(OracleCombine, Fp8SumsOverNodesAreAddedByNodesThatRound) {
  // Node 0 adds 256 + 1, which it rounds to 256, and the source adds node 1's 1 to it; in fp32 the three are 258.
  const std::vector<float> y = {256, 0, 1, 0, 1, 0, 0, 0};
  EXPECT_EQ(combine_fp8_sums(two_entries_on_each(4, 4), y), pack_bf16({258}));
  EXPECT_EQ(combine_fp8_sums(two_entries_on_each(4, 2), y), pack_bf16({256}));
}

TEST(OracleCombine, AnInfiniteFp8SumMakesItsBlockNanAndANanOnlyItself) {
  const float inf = std::numeric_limits<float>::infinity();
  const World world = two_entries_on_each(1, 1);
  CombineInputs inputs;
  inputs.hidden = 256;
  inputs.weighted = true;
  inputs.order = CombineOrder::kRankSums;
  inputs.wire_format = WireFormat::kFp8;
  std::vector<float> rows(512, 1.0F);
  rows[3] = inf;
  rows[130] = std::bit_cast<float>(0x7F810000U);
  rows[131] = rows[256 + 131] = 224;  // makes the scale of the second block 1
  inputs.x = {pack_bf16(rows)};
  const Bytes sums = combine(world, route(world).value(), inputs)[0].x;
  std::vector<float> expected(256, 2.0F);
  std::fill_n(expected.begin(), 128, std::bit_cast<float>(0x7FFF0000U));
  expected[130] = std::bit_cast<float>(0x7FFF0000U);
  expected[131] = 448;
  EXPECT_EQ(sums, pack_bf16(expected));
}

TEST(OracleCombine, RankSumsOfNothingAreZeroAndNeverMinusZero) {
  World world = two_entries_on_each(2, 2);
  EXPECT_EQ(combine_rank_sums(world, {-0.0F, -0.0F, -0.0F, -0.0F}), pack_bf16({0.0F}));
  world.ranks[0].topk_idx = {-1, -1, -1, -1};
  EXPECT_EQ(combine_rank_sums(world, {1, 1, 1, 1}), pack_bf16({0.0F}));
  EXPECT_EQ(combine_fp8_sums(world, {1, 1, 1, 1}), pack_bf16({0.0F}));
  world.ranks_per_node = 1;
  EXPECT_EQ(combine_rank_sums(world, {1, 1, 1, 1}), pack_bf16({0.0F}));
}

}  // namespace
}  // namespace ferry::oracle
