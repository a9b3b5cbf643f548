#include "oracle/oracle.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "unit/oracle_worlds.hpp"

// The oracle checks all other code, so every expectation is computed by hand.

namespace ferry::oracle {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<std::uint16_t> unpack_u16(const Bytes& bytes) {
  std::vector<std::uint16_t> values(bytes.size() / 2);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::vector<Source> sources(std::initializer_list<std::pair<int, int>> pairs) {
  std::vector<Source> out;
  for (const auto& [rank, token] : pairs) out.push_back({rank, token});
  return out;
}

TEST(OracleRoute, Tokens) {
  const auto routings = route(two_ranks(Layout::kTokens)).value();
  EXPECT_EQ(routings[0].num_recv_rows, 3);
  EXPECT_EQ(routings[0].num_used_rows, 3);
  EXPECT_EQ(routings[0].source, sources({{0, 0}, {0, 2}, {1, 0}}));
  EXPECT_EQ(routings[1].source, sources({{0, 0}, {0, 1}}));
  EXPECT_EQ(routings[0].slots, (std::vector<std::int32_t>{0, 0, 1, 1, -1, 1}));
  EXPECT_EQ(routings[1].slots, (std::vector<std::int32_t>{2, 2, -1, -1}));
  EXPECT_EQ(routings[0].num_rows_from_rank, (std::vector<std::int64_t>{2, 1}));
  EXPECT_EQ(routings[1].num_rows_from_rank, (std::vector<std::int64_t>{2, 0}));
  EXPECT_EQ(routings[0].num_rows_to_rank, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(routings[1].num_rows_to_rank, (std::vector<std::int64_t>{1, 0}));
  EXPECT_EQ(routings[0].num_rows_per_local_expert, (std::vector<std::int32_t>{2, 2}));
  EXPECT_EQ(routings[1].num_rows_per_local_expert, (std::vector<std::int32_t>{1, 1}));
  EXPECT_EQ(routings[1].local_expert_ids, (std::vector<std::int32_t>{2, 3}));
  EXPECT_TRUE(routings[0].expert_row_offsets.empty());
}

TEST(OracleRoute, ExpertsAligned) {
  World world = two_ranks(Layout::kExperts);
  world.options.expert_alignment = 4;
  const auto routings = route(world).value();
  EXPECT_EQ(routings[0].num_recv_rows, 8);
  EXPECT_EQ(routings[0].expert_row_offsets, (std::vector<std::int64_t>{0, 4, 8}));
  EXPECT_EQ(routings[0].source, sources({{0, 0}, {1, 0}, {-1, -1}, {-1, -1}, {0, 2}, {1, 0}, {-1, -1}, {-1, -1}}));
  EXPECT_EQ(routings[0].slots, (std::vector<std::int32_t>{0, 0, 4, 4, -1, 4}));
  EXPECT_EQ(routings[1].slots, (std::vector<std::int32_t>{1, 5, -1, -1}));
  EXPECT_EQ(routings[0].num_rows_from_rank, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(routings[0].num_rows_to_rank, (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(routings[1].num_rows_to_rank, (std::vector<std::int64_t>{2, 0}));
}

TEST(OracleRoute, SlabHoldsExactlyItsCapacity) {
  World world = two_ranks(Layout::kSlab);
  world.options.slab_capacity = 2;
  const auto routings = route(world).value();
  EXPECT_EQ(routings[1].num_recv_rows, 4);
  EXPECT_EQ(routings[1].num_used_rows, 4);
  EXPECT_EQ(routings[1].expert_row_offsets, (std::vector<std::int64_t>{0, 2, 4}));
  EXPECT_EQ(routings[1].source, sources({{0, 0}, {-1, -1}, {0, 1}, {-1, -1}}));
  world.options.slab_capacity = 1;
  EXPECT_EQ(route(world).status().code(), ErrorCode::kCapacity);
}

TEST(OracleRoute, MaxRecvRows) {
  World world = two_ranks(Layout::kTokens);
  world.max_recv_rows = {5, 2};
  const auto routings = route(world).value();
  EXPECT_EQ(routings[0].num_recv_rows, 5);
  EXPECT_EQ(routings[0].num_used_rows, 3);
  EXPECT_EQ(routings[1].num_recv_rows, 2);
  world.max_recv_rows = {5, 1};
  EXPECT_EQ(route(world).status().code(), ErrorCode::kCapacity);
  world = two_ranks(Layout::kSlab);
  world.options.slab_capacity = 2;
  world.max_recv_rows = {8, 8};
  EXPECT_EQ(route(world).status().code(), ErrorCode::kInvalidArgument);
}

TEST(OracleRoute, PlacementThatRanksDoNotDivide) {
  World world;
  world.num_ranks = 3;
  world.ranks_per_node = 3;
  world.options.num_experts = 7;
  world.ranks.resize(3);
  EXPECT_EQ(expert_owners(world), (std::vector<std::int32_t>{0, 0, 1, 1, 2, 2, 2}));
  world.options.expert_to_rank = {2, 0, 2, 0, 0, 2, 0};
  const auto routings = route(world).value();
  EXPECT_EQ(routings[0].local_expert_ids, (std::vector<std::int32_t>{1, 3, 4, 6}));
  EXPECT_TRUE(routings[1].local_expert_ids.empty());
  EXPECT_EQ(routings[2].local_expert_ids, (std::vector<std::int32_t>{0, 2, 5}));
}

TEST(OracleRoute, RefusesIdsOutOfRange) {
  World world = two_ranks(Layout::kTokens);
  world.ranks[0].topk_idx[0] = 4;
  EXPECT_EQ(route(world).status().code(), ErrorCode::kInvalidArgument);
  world.ranks[0].topk_idx[0] = -2;
  EXPECT_EQ(route(world).status().code(), ErrorCode::kInvalidArgument);
}

TEST(OracleDispatch, TokensCarryRowsIdsAndWeights) {
  World world = two_ranks(Layout::kTokens);
  world.max_recv_rows = {4, 0};
  const auto routings = route(world).value();
  DispatchInputs inputs;
  inputs.row_bytes = inputs.scale_row_bytes = 4;
  inputs.x = {pack({10, 11, 12}), pack({20, 21})};
  inputs.scales = {pack({-10, -11, -12}), pack({-20, -21})};
  const auto received = dispatch(world, routings, inputs);
  EXPECT_EQ(unpack(received[0].x), (std::vector<float>{10, 12, 20, 0}));
  EXPECT_EQ(unpack(received[0].scales), (std::vector<float>{-10, -12, -20, 0}));
  EXPECT_EQ(unpack(received[1].x), (std::vector<float>{10, 11}));
  EXPECT_EQ(received[0].holds_token, (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(received[0].topk_idx, (std::vector<std::int64_t>{0, -1, -1, 1, 0, 1, -1, -1}));
  EXPECT_EQ(received[0].topk_weights, (std::vector<float>{0.5F, 0, 0, 2, 3, 4, 0, 0}));
  EXPECT_EQ(received[0].source, sources({{0, 0}, {0, 2}, {1, 0}, {-1, -1}}));
  EXPECT_EQ(received[1].topk_idx, (std::vector<std::int64_t>{-1, 0, 1, 1}));
  EXPECT_EQ(received[1].topk_weights, (std::vector<float>{0, 0.25F, 0.125F, 1}));
}

TEST(OracleDispatch, ExpertsCarryOneWeightARow) {
  World world = two_ranks(Layout::kExperts);
  world.options.expert_alignment = 3;
  const auto routings = route(world).value();
  DispatchInputs inputs;
  inputs.row_bytes = 4;
  inputs.x = {pack({10, 11, 12}), pack({20, 21})};
  const auto received = dispatch(world, routings, inputs);
  EXPECT_EQ(unpack(received[0].x), (std::vector<float>{10, 20, 0, 12, 20, 0}));
  EXPECT_EQ(received[0].topk_weights, (std::vector<float>{0.5F, 3, 0, 2, 4, 0}));
  EXPECT_EQ(received[1].topk_weights, (std::vector<float>{0.25F, 0, 0, 1.125F, 0, 0}));
  EXPECT_TRUE(received[0].topk_idx.empty());
  inputs.topk_weights = {{1, 2, 3, 4, 5, 6}, {7, 8, 9, 10}};
  EXPECT_EQ(dispatch(world, routings, inputs)[0].topk_weights, (std::vector<float>{1, 7, 0, 6, 8, 0}));
}

TEST(OracleCombine, SumsEachRowOnceOrEachEntryWeighted) {
  const World world = two_ranks(Layout::kTokens);
  const auto routings = route(world).value();
  CombineInputs inputs;
  inputs.dtype = DType::kFloat32;
  inputs.hidden = 1;
  inputs.x = {pack({1, 2, 3}), pack({10, 20})};
  EXPECT_EQ(unpack(combine(world, routings, inputs)[0].x), (std::vector<float>{11, 20, 2}));
  EXPECT_EQ(unpack(combine(world, routings, inputs)[1].x), (std::vector<float>{3, 0}));
  inputs.weighted = true;
  EXPECT_EQ(unpack(combine(world, routings, inputs)[0].x), (std::vector<float>{3, 22.5F, 4}));
  EXPECT_EQ(unpack(combine(world, routings, inputs)[1].x), (std::vector<float>{21, 0}));
  inputs.topk_weights = {{1, 1, 1, 1, 1, 1}, {1, 0, 5, 5}};
  EXPECT_EQ(unpack(combine(world, routings, inputs)[0].x), (std::vector<float>{11, 40, 2}));
  inputs.bias = {{{pack({100, 200, 300}), pack({400, 500})}, {pack({0.5F, 0.5F, 0.5F}), pack({0.25F, 0.25F})}}};
  EXPECT_EQ(unpack(combine(world, routings, inputs)[0].x), (std::vector<float>{111.5F, 240.5F, 302.5F}));
  EXPECT_EQ(unpack(combine(world, routings, inputs)[1].x), (std::vector<float>{403.25F, 500.25F}));
}

TEST(OracleQuantize, ARowOfEveryMode) {
  // The second block has NaN in all its 16 channels.
  std::vector<float> row(128, 0.0F);
  row[0] = 896.0F;  // the multiplier of FP8 is 1/2
  row[1] = -3.0F;   // -1.5
  row[2] = 17.0F;   // 8.5, halfway between the codes of 8 and 9
  row.resize(144, std::numeric_limits<float>::quiet_NaN());
  const Bytes x = pack_bf16(row);
  const auto byte = [](const Bytes& bytes, std::size_t at) { return std::to_integer<int>(bytes[at]); };

  const QuantizedRows fp8 = quantize(x, 144, Quantization::kFp8, DType::kFloat32);
  EXPECT_EQ(unpack(fp8.scales), (std::vector<float>{2.0F, 1e-4F / 448.0F}));
  EXPECT_EQ(fp8.x.size(), 144U);
  EXPECT_EQ(byte(fp8.x, 0), 0x7E);
  EXPECT_EQ(byte(fp8.x, 1), 0xBC);
  EXPECT_EQ(byte(fp8.x, 2), 0x50);
  EXPECT_EQ(byte(fp8.x, 128), 0x7F);

  const QuantizedRows words = quantize(x, 144, Quantization::kFp8Ue8m0, DType::kInt32);
  EXPECT_EQ(words.scale_row_bytes, 4U);
  EXPECT_EQ(byte(words.scales, 0), 128);       // 2 = 2^(128 - 127)
  EXPECT_EQ(byte(words.scales, 1), 127 - 22);  // 2^-22 is above 1e-4 / 448, 2^-23 below
  EXPECT_EQ(byte(words.scales, 2), 0);

  const QuantizedRows int8 = quantize(x, 144, Quantization::kInt8, DType::kFloat32);
  EXPECT_EQ(unpack(int8.scales)[0], 896.0F / 127.0F);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(unpack(int8.scales)[1]), 0x7FFFFFFFU);
  EXPECT_EQ(byte(int8.x, 0), 127);
  EXPECT_EQ(byte(int8.x, 2), 2);  // 2.41
  EXPECT_EQ(byte(int8.x, 128), 0);
}

TEST(OracleCombine, ReturnsWeights) {
  World world = two_ranks(Layout::kTokens);
  CombineInputs inputs;
  inputs.dtype = DType::kFloat32;
  inputs.hidden = 1;
  inputs.x = {pack({1, 2, 3}), pack({10, 20})};
  inputs.weights = {{1, 2, 3, 4, 5, 6}, {10, 20, 30, 40}};
  auto combined = combine(world, route(world).value(), inputs);
  EXPECT_EQ(combined[0].weights, (std::vector<float>{11, 22, 30, 40, 3, 4}));
  EXPECT_EQ(combined[1].weights, (std::vector<float>{5, 6, 0, 0}));
  world.ranks_per_node = 1;
  combined = combine(world, route(world).value(), inputs);
  EXPECT_EQ(combined[0].weights, (std::vector<float>{11, 22, 30, 40, 3, 4}));

  world = two_ranks(Layout::kExperts);
  inputs.x = {pack({1, 2, 3, 4}), pack({10, 20})};
  inputs.weights = {{1, 2, 3, 4}, {10, 20}};
  combined = combine(world, route(world).value(), inputs);
  EXPECT_EQ(combined[0].weights, (std::vector<float>{1, 10, 20, 20, 0, 3}));
  EXPECT_EQ(combined[1].weights, (std::vector<float>{2, 4, 0, 0}));
}

/// One token of rank 0 for one expert on each of `num_ranks` ranks, the last rank's first.
World one_token_everywhere(int num_ranks, int ranks_per_node) {
  World world;
  world.num_ranks = world.num_topk = num_ranks;
  world.ranks_per_node = ranks_per_node;
  world.options.num_experts = num_ranks;
  world.ranks.resize(static_cast<std::size_t>(num_ranks));
  world.ranks[0].num_tokens = 1;
  for (int k = 0; k < num_ranks; ++k) {
    world.ranks[0].topk_idx.push_back(num_ranks - 1 - k);
    world.ranks[0].topk_weights.push_back(1.0F);
  }
  return world;
}

float combine_one(const World& world, const std::vector<float>& y, bool weighted = false, float bias = 0) {
  CombineInputs inputs;
  inputs.dtype = DType::kFloat32;
  inputs.hidden = 1;
  inputs.weighted = weighted;
  for (float value : y) inputs.x.push_back(pack({value}));
  inputs.bias[0].assign(y.size(), pack({bias}));
  return unpack(combine(world, route(world).value(), inputs)[0].x)[0];
}

TEST(OracleCombine, AddsInAscendingRankOrderNotInTopkOrder) {
  const float big = 0x1p24F;
  const World world = one_token_everywhere(3, 3);
  EXPECT_EQ(combine_one(world, {big, 1, 1}), big);
  EXPECT_EQ(combine_one(world, {1, 1, big}), big + 2);
  EXPECT_EQ(combine_one(world, {big, 1, 1}, true), big);
  EXPECT_EQ(combine_one(world, {1, 1, big}, true), big + 2);
  EXPECT_EQ(combine_one(world, {1, 1, 0}, false, big), big) << "biases are added first";
}

TEST(OracleCombine, WeightedUsesOneRoundingPerTerm) {
  World world = one_token_everywhere(1, 1);
  world.ranks[0].topk_weights[0] = 1 + 0x1p-12F;
  EXPECT_EQ(combine_one(world, {1 + 0x1p-12F}, true, -1.0F), 0x1p-11F + 0x1p-24F);
}

TEST(OracleCombine, NodesRoundTheirPartialSums) {
  CombineInputs inputs;
  inputs.hidden = 1;
  for (float value : {1.0F, 0x1p-8F, 0x1p-8F, 0.0F}) inputs.x.push_back(pack_bf16({value}));
  const World one_node = one_token_everywhere(4, 4);
  const World two_nodes = one_token_everywhere(4, 2);
  EXPECT_EQ(combine(one_node, route(one_node).value(), inputs)[0].x, pack_bf16({1 + 0x1p-7F}));
  EXPECT_EQ(combine(two_nodes, route(two_nodes).value(), inputs)[0].x, pack_bf16({1.0F}));
  // In f32 a node's sum starts from zero: (2^24) + (1 + 1), where one node gives (2^24 + 1) + 1.
  EXPECT_EQ(combine_one(two_nodes, {0x1p24F, 0, 1, 1}), 0x1p24F + 2);
  EXPECT_EQ(combine_one(one_node, {0x1p24F, 0, 1, 1}), 0x1p24F);
}

TEST(OracleCombine, RoundsToNearestEvenAndMakesNanCanonical) {
  World world = one_token_everywhere(1, 1);
  CombineInputs inputs;
  inputs.hidden = 4;
  inputs.x = {pack_bf16({1.0F, -kInf, std::bit_cast<float>(0xFF810000U), -0.0F})};
  inputs.bias[0] = {pack_bf16({0x1p-8F, kInf, 0.0F, -0.0F})};
  const auto combined = combine(world, route(world).value(), inputs);
  EXPECT_EQ(unpack_u16(combined[0].x), (std::vector<std::uint16_t>{0x3F80, 0x7FFF, 0x7FFF, 0x0000}));
  inputs.x = {pack_bf16({1 + 0x1p-7F, 0x1.FEp127F, 0, 1})};
  inputs.bias[0] = {pack_bf16({0x1p-8F, 0x1p119F, 0, 0x1p-9F})};
  const auto rounded = combine(world, route(world).value(), inputs);
  EXPECT_EQ(unpack_u16(rounded[0].x), (std::vector<std::uint16_t>{0x3F82, 0x7F80, 0x0000, 0x3F80}));

  inputs.dtype = DType::kFloat32;
  inputs.hidden = 1;
  inputs.x = {pack({kInf})};
  inputs.bias[0] = {pack({-kInf})};
  const Bytes nan = combine(world, route(world).value(), inputs)[0].x;
  EXPECT_EQ(std::bit_cast<std::uint32_t>(unpack(nan)[0]), 0x7FFFFFFFU);
}

/// Worked by hand: a block's largest magnitude becomes 448, and E4M3 has steps of an eighth of a power of two.
TEST(OracleCombine, Fp8RowsAreRoundedBeforeTheyAreSummed) {
  constexpr std::size_t kHidden = 128;
  std::vector<float> large(kHidden, 0.0F);
  std::vector<float> small(kHidden, 0.0F);
  large[0] = 448;       // scale 1
  large[1] = 17;        // between 16 and 18: the even code, 16
  large[2] = 19;        // between 18 and 20: 20
  large[3] = -3.3F;     // steps of 0.25: -3.25
  large[4] = 0x1p-10F;  // half of the smallest number: 0
  small[0] = -224;      // scale 0.5
  small[1] = 8.5F;      // 17 * 0.5: 16 * 0.5
  small[2] = 1;
  const World world = one_token_everywhere(2, 2);
  CombineInputs inputs;
  inputs.dtype = DType::kFloat32;
  inputs.hidden = kHidden;
  inputs.x = {pack(large), pack(small)};
  inputs.bias[0] = {pack(std::vector<float>(kHidden, 17)), {}};
  inputs.wire_format = WireFormat::kFp8;
  std::vector<float> expected(kHidden, 17);
  expected[0] = 17 + 448 - 224;
  expected[1] = 17 + 16 + 8;
  expected[2] = 17 + 20 + 1;
  expected[3] = 17 - 3.25F;
  EXPECT_EQ(unpack(combine(world, route(world).value(), inputs)[0].x), expected);

  // An infinity makes its block NaN, and a NaN only itself.
  large[0] = kInf;
  small[5] = std::bit_cast<float>(0xFF810000U);
  inputs.bias = {};
  inputs.x = {pack(large), pack(small)};
  for (const float sum : unpack(combine(world, route(world).value(), inputs)[0].x)) EXPECT_TRUE(std::isnan(sum));
  inputs.x = {pack(small), pack(std::vector<float>(kHidden, 0.0F))};
  const std::vector<float> sums = unpack(combine(world, route(world).value(), inputs)[0].x);
  EXPECT_EQ(sums[1], 8);
  EXPECT_TRUE(std::isnan(sums[5]));
}

}  // namespace
}  // namespace ferry::oracle
