/// The gate compared with its definition, bit by bit, on every instruction set; its exponential, noise, capacity and
/// presets.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "ferry/gating.hpp"
#include "numeric/gating.hpp"
#include "support/gating_case.hpp"

namespace ferry {
namespace {

test::GatingResult run(const numeric::GatingVariant& variant, const test::GatingCase& one) {
  const auto num_entries = static_cast<std::size_t>(one.num_tokens * one.options.num_topk);
  std::vector<std::int32_t> narrow(num_entries, -7);
  std::vector<std::int64_t> wide(num_entries, -7);
  std::vector<float> weights(num_entries, -7.0F);
  const std::int64_t num_topk = one.options.num_topk;
  variant.choose({.options = one.options,
                  .num_tokens = one.num_tokens,
                  .num_experts = static_cast<int>(one.num_experts),
                  .logits = one.is_bfloat16 ? static_cast<const void*>(one.narrow.data()) : one.logits.data(),
                  .is_bfloat16 = one.is_bfloat16,
                  .bias = one.bias.empty() ? nullptr : one.bias.data(),
                  .ids = one.wide_ids ? static_cast<void*>(wide.data()) : narrow.data(),
                  .wide_ids = one.wide_ids,
                  .ids_row_stride = num_topk,
                  .weights = weights.data(),
                  .weights_row_stride = num_topk});
  if (!one.wide_ids) wide.assign(narrow.begin(), narrow.end());
  test::GatingResult result{std::move(wide), {}};
  for (float weight : weights) result.weight_bits.push_back(std::bit_cast<std::uint32_t>(weight));
  return result;
}

TEST(GatingRules, EveryInstructionSetGivesTheBitsOfTheDefinition) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 1500; ++i) {
    const test::GatingCase one = test::draw_gating_case(random, i % 10 == 0 ? 700 : 96, 12);
    const test::GatingResult expected = test::choose_by_definition(one);
    for (const numeric::GatingVariant& variant : numeric::gating_variants()) {
      if (!variant.available) continue;
      const test::GatingResult got = run(variant, one);
      ASSERT_EQ(got.ids, expected.ids) << variant.name << ", case " << i << ": " << one.name();
      ASSERT_EQ(got.weight_bits, expected.weight_bits) << variant.name << ", case " << i << ": " << one.name();
    }
  }
}

TEST(GatingRules, ExponentialIsWithinItsError) {
  constexpr double kMaxUlps = 1.01;
  constexpr std::uint32_t kStep = 997;  // a million of 1.1e9 values
  for (std::uint32_t bits = 0x80000000U; bits <= numeric::bits_of(numeric::kExponentialFloor); bits += kStep) {
    const float x = numeric::float_of(bits);
    const double exact = std::exp(static_cast<double>(x));
    int exponent = 0;
    std::frexp(exact, &exponent);
    const double ulp = std::ldexp(1.0, exponent - std::numeric_limits<float>::digits);
    ASSERT_LE(std::fabs(static_cast<double>(numeric::exponential(x)) - exact), kMaxUlps * ulp) << "e^" << x;
  }
  EXPECT_EQ(numeric::exponential(0.0F), 1.0F);
  EXPECT_EQ(numeric::exponential(-87.01F), 0.0F);
  EXPECT_EQ(numeric::exponential(-std::numeric_limits<float>::infinity()), 0.0F);
  EXPECT_EQ(numeric::exponential(std::nanf("")), 0.0F);
  EXPECT_EQ(numeric::sigmoid(0.0F), 0.5F);
  EXPECT_NEAR(numeric::sigmoid(2.0F), 1 / (1 + std::exp(-2.0)), 1e-7);
  EXPECT_NEAR(numeric::sigmoid(-2.0F), 1 / (1 + std::exp(2.0)), 1e-7);
}

/// Known answers for 10 rounds, published with Random123, the authors' library.
TEST(GatingRules, PhiloxGivesItsKnownAnswers) {
  const auto draw = [](std::uint32_t word, std::uint64_t key) {
    const numeric::PhiloxWords drawn = numeric::philox({{word, word, word, word}}, key);
    return std::vector<std::uint32_t>(std::begin(drawn.words), std::end(drawn.words));
  };
  EXPECT_EQ(draw(0, 0), (std::vector<std::uint32_t>{0x6627E8D5U, 0xE169C58DU, 0xBC57AC4CU, 0x9B00DBD8U}));
  EXPECT_EQ(draw(~0U, ~0ULL), (std::vector<std::uint32_t>{0x408F276DU, 0x41C83B0EU, 0xA20BC7C6U, 0x6D5451FDU}));
}

TEST(GatingRules, NoiseHasMeanZeroAndVarianceOne) {
  double sum = 0;
  double squares = 0;
  float most = 0;
  constexpr int kNumDraws = 200'000;
  for (int i = 0; i < kNumDraws; ++i) {
    const float drawn = numeric::unit_noise(7, i / 256, i % 256);
    sum += static_cast<double>(drawn);
    squares += static_cast<double>(drawn) * static_cast<double>(drawn);
    most = std::max(most, std::fabs(drawn));
  }
  EXPECT_NEAR(sum / kNumDraws, 0.0, 0.01);
  EXPECT_NEAR(squares / kNumDraws, 1.0, 0.01);
  EXPECT_LE(most, 2 * std::sqrt(3.0F));
  EXPECT_NE(numeric::unit_noise(7, 0, 0), numeric::unit_noise(8, 0, 0));
}

struct Chosen {
  std::vector<std::int64_t> ids;
  std::vector<float> weights;
};

Chosen choose(const std::vector<float>& logits, std::int64_t num_experts, const GatingOptions& options) {
  const std::int64_t num_tokens = static_cast<std::int64_t>(logits.size()) / num_experts;
  const auto num_entries = static_cast<std::size_t>(num_tokens * options.num_topk);
  Chosen chosen{std::vector<std::int64_t>(num_entries), std::vector<float>(num_entries)};
  throw_if_error(select_experts(ConstTensorView(logits.data(), DType::kFloat32, {num_tokens, num_experts}), {}, options,
                                TensorView(chosen.ids.data(), DType::kInt64, {num_tokens, options.num_topk}),
                                TensorView(chosen.weights.data(), DType::kFloat32, {num_tokens, options.num_topk})));
  return chosen;
}

TEST(GatingRules, NoiseMovesTheChoiceButNotTheWeights) {
  const std::vector<float> logits(std::size_t{400} * 16, 0.0F);
  GatingOptions options{.num_topk = 2, .noise = 1.0F, .noise_seed = 5};
  const Chosen first = choose(logits, 16, options);
  std::vector<int> counts(16, 0);
  for (std::int64_t id : first.ids) ++counts[static_cast<std::size_t>(id)];
  EXPECT_GT(*std::min_element(counts.begin(), counts.end()), 20) << "50 each are expected";
  EXPECT_EQ(first.weights, std::vector<float>(800, 0.5F));
  EXPECT_EQ(choose(logits, 16, options).ids, first.ids);
  options.noise_seed = 6;
  EXPECT_NE(choose(logits, 16, options).ids, first.ids);
  options.noise_seed = 5;
  options.first_token = 1;
  const Chosen later = choose(logits, 16, options);
  EXPECT_TRUE(std::equal(first.ids.begin() + 2, first.ids.end(), later.ids.begin())) << "noise follows the token";
}

TEST(GatingRules, FullExpertsDropTokensOrSendThemElsewhere) {
  // Three tokens that all want experts 2 and 1, in this order.
  std::vector<float> logits;
  for (int t = 0; t < 3; ++t) logits.insert(logits.end(), {0.0F, 1.0F, 2.0F, -1.0F});
  GatingOptions options{.score = GatingScore::kSoftmaxOfChosen, .num_topk = 2, .capacity = 1};
  const Chosen dropped = choose(logits, 4, options);
  EXPECT_EQ(dropped.ids, (std::vector<std::int64_t>{2, 1, -1, -1, -1, -1}));
  EXPECT_EQ(std::vector<float>(dropped.weights.begin() + 2, dropped.weights.end()), std::vector<float>(4, 0.0F));
  options.overflow = GatingOverflow::kRechoose;
  const Chosen chosen = choose(logits, 4, options);
  EXPECT_EQ(chosen.ids, (std::vector<std::int64_t>{2, 1, 0, 3, -1, -1})) << "the last token finds no free expert";
  EXPECT_EQ(chosen.weights[0], chosen.weights[2]) << "0 and 3 differ by as much as 2 and 1";
  EXPECT_EQ(chosen.weights[4], 0.0F);
}

TEST(GatingRules, GroupsMayBeJudgedByTheirBest) {
  GatingOptions options{.num_topk = 2, .num_groups = 2, .group_score = GatingGroupScore::kBest};
  EXPECT_EQ(choose({3.0F, -9.0F, -9.0F, 1.0F, 1.5F, 0.0F}, 6, options).ids, (std::vector<std::int64_t>{0, 1}));
}

TEST(GatingRules, BiasGoesTowardsTheMeanLoad) {
  std::vector<float> bias = {0.5F, 0.0F, -0.5F, 1.0F};
  const std::vector<std::int32_t> load = {10, 4, 6, 4};  // mean 6
  throw_if_error(update_gating_bias(TensorView(bias.data(), DType::kFloat32, {4}),
                                    ConstTensorView(load.data(), DType::kInt32, {4}), 0.25F));
  EXPECT_EQ(bias, (std::vector<float>{0.25F, 0.25F, -0.5F, 1.25F}));
  const std::vector<std::int64_t> uneven = {2, 2, 2, 1};  // mean 1.75
  throw_if_error(update_gating_bias(TensorView(bias.data(), DType::kFloat32, {4}),
                                    ConstTensorView(uneven.data(), DType::kInt64, {4}), 0.25F));
  EXPECT_EQ(bias, (std::vector<float>{0.0F, 0.0F, -0.75F, 1.5F}));
}

TEST(GatingRules, BadBiasUpdatesAreRefusedAndNothingIsWritten) {
  std::vector<float> bias(4, 1.0F);
  const std::vector<std::int64_t> load = {1, 2, 3, -1};
  const TensorView good_bias(bias.data(), DType::kFloat32, {4});
  const ConstTensorView good_load(load.data(), DType::kInt64, {3});
  const auto refused = [](const Status& status, std::string_view mentions) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(status.message().find(mentions), std::string_view::npos) << status.message();
  };
  refused(update_gating_bias({}, good_load, 0.1F), "bias is absent");
  refused(update_gating_bias(good_bias, good_load, 0.1F), "load is [3]");
  refused(update_gating_bias(good_bias, ConstTensorView(load.data(), DType::kInt64, {4}), 0.1F), "load is -1");
  refused(update_gating_bias(good_bias, ConstTensorView(load.data(), DType::kFloat32, {4}), 0.1F), "load is f32");
  refused(update_gating_bias(TensorView(bias.data(), DType::kFloat32, {3}), good_load, -1.0F), "rate is -1");
  EXPECT_EQ(bias, std::vector<float>(4, 1.0F));
}

TEST(GatingRules, PresetsAreThoseOfThePublishedModels) {
  for (const GatingPreset& preset : gating_presets()) {
    EXPECT_EQ(find_gating_preset(preset.name), &preset);
    EXPECT_FALSE(preset.source.empty());
    // Each preset is usable: its weights sum to the scale.
    const std::vector<float> logits(static_cast<std::size_t>(preset.num_experts), 0.5F);
    const Chosen chosen = choose(logits, preset.num_experts, preset.options);
    EXPECT_NEAR(std::accumulate(chosen.weights.begin(), chosen.weights.end(), 0.0F), preset.options.scale, 1e-5F)
        << preset.name;
  }
  EXPECT_EQ(find_gating_preset("none"), nullptr);
}

}  // namespace
}  // namespace ferry
