/// Tests that the gating kernels give the documented results, bit by bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <vector>

#include "cuda/local/gating.hpp"
#include "emulator/emulator.hpp"
#include "support/gating_case.hpp"

namespace ferry::emulator {
namespace {

test::GatingResult run_emulated(const test::GatingCase& one) {
  constexpr int kNumSms = 1;
  const auto num_entries = static_cast<std::size_t>(one.num_tokens * one.options.num_topk);
  std::vector<std::int32_t> narrow(num_entries, -7);
  std::vector<std::int64_t> wide(num_entries, -7);
  std::vector<float> weights(num_entries, -7.0F);
  Machine machine(1);
  const cudaError_t error =
      cuda::launch_gating({.options = one.options,
                           .num_tokens = one.num_tokens,
                           .num_experts = static_cast<int>(one.num_experts),
                           .logits = one.is_bfloat16 ? static_cast<const void*>(one.narrow.data()) : one.logits.data(),
                           .is_bfloat16 = one.is_bfloat16,
                           .bias = one.bias.empty() ? nullptr : one.bias.data(),
                           .ids = one.wide_ids ? static_cast<void*>(wide.data()) : narrow.data(),
                           .wide_ids = one.wide_ids,
                           .ids_row_stride = 1,  // column-major
                           .ids_column_stride = one.num_tokens,
                           .weights = weights.data(),
                           .weights_row_stride = one.options.num_topk},
                          kNumSms, machine.add_stream());
  EXPECT_EQ(error, cudaSuccess);
  EXPECT_EQ(machine.run(), "");
  if (!one.wide_ids) wide.assign(narrow.begin(), narrow.end());
  test::GatingResult result;
  for (std::size_t t = 0; t < static_cast<std::size_t>(one.num_tokens); ++t) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(one.options.num_topk); ++k) {
      result.ids.push_back(wide[k * static_cast<std::size_t>(one.num_tokens) + t]);
    }
  }
  for (float weight : weights) result.weight_bits.push_back(std::bit_cast<std::uint32_t>(weight));
  return result;
}

TEST(EmulatedGating, GivesTheBitsOfTheDefinition) {
  constexpr int kNumCases = 120;
  std::mt19937_64 random(4);
  for (int i = 0; i < kNumCases; ++i) {
    const test::GatingCase one = test::draw_gating_case(random, i % 4 == 0 ? 512 : 96, 6);
    const test::GatingResult expected = test::choose_by_definition(one);
    const test::GatingResult emulated = run_emulated(one);
    ASSERT_EQ(emulated.ids, expected.ids) << "case " << i << ": " << one.name();
    ASSERT_EQ(emulated.weight_bits, expected.weight_bits) << "case " << i << ": " << one.name();
  }
}

TEST(EmulatedGating, WarpsThatWeighSeveralTokensAtOnce) {
  constexpr int kNumCases = 12;
  std::mt19937_64 random(6);
  for (int i = 0; i < kNumCases; ++i) {
    const test::GatingCase one = test::draw_gating_case(random, i % 4 == 0 ? 256 : 40, 250);
    EXPECT_EQ(run_emulated(one), test::choose_by_definition(one)) << one.name();
  }
}

TEST(EmulatedGating, WarpsThatChooseForSeveralTokensAtOnce) {
  constexpr int kNumCases = 16;
  std::mt19937_64 random(7);
  int num_drawn = 0;
  while (num_drawn < kNumCases) {
    test::GatingCase one = test::draw_gating_case(random, 512, 50);
    if (one.num_experts % 128 != 0 || one.num_tokens < 24) continue;
    one.options.num_topk = std::min(one.options.num_topk, 8);
    one.options.noise = 0;
    EXPECT_EQ(run_emulated(one), test::choose_by_definition(one)) << one.name();
    ++num_drawn;
  }
}

TEST(EmulatedGating, TokensThatChooseAgainOverSeveralWindows) {
  constexpr int kNumCases = 16;
  std::mt19937_64 random(8);
  for (int i = 0; i < kNumCases; ++i) {
    test::GatingCase one = test::draw_gating_case(random, 48, 300);
    const std::int64_t even = (one.num_tokens * one.options.num_topk + one.num_experts - 1) / one.num_experts;
    one.options.capacity = even + even / 4 * (i % 3);
    one.options.overflow = GatingOverflow::kRechoose;
    EXPECT_EQ(run_emulated(one), test::choose_by_definition(one)) << one.name();
  }
}

TEST(EmulatedGating, PresetsOverSeveralBlocks) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  for (const GatingPreset& preset : gating_presets()) {
    test::GatingCase one{.options = preset.options, .num_tokens = 150, .num_experts = preset.num_experts};
    for (std::int64_t i = 0; i < one.num_tokens * one.num_experts; ++i) one.logits.push_back(normal(random));
    for (std::int64_t e = 0; e < one.num_experts && preset.has_bias; ++e) one.bias.push_back(normal(random) * 0.05F);
    EXPECT_EQ(run_emulated(one), test::choose_by_definition(one)) << preset.name;
  }
}

}  // namespace
}  // namespace ferry::emulator
