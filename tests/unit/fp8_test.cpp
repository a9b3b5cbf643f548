#include "ferry/fp8.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace ferry {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Value of a non-NaN code by the format's definition: 4 exponent bits with bias 7, 3 fraction bits.
double value_of(int code) {
  const int exponent = (code >> 3) & 15;
  const int fraction = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

/// Nearest code by trying all of them; ties to the even code; beyond the largest, the largest.
int nearest_code(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7F;
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), 448.0);
  int best = 0;
  for (int code = 1; code <= 0x7E; ++code) {
    const double distance = std::fabs(value_of(code) - magnitude);
    const double best_distance = std::fabs(value_of(best) - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return sign | best;
}

TEST(Fp8, EveryCodeDecodesToItsValue) {
  for (int code = 0; code < 256; ++code) {
    const float value = float_from_fp8_e4m3(static_cast<std::uint8_t>(code));
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(value, value_of(code)) << code;
    }
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
  }
  EXPECT_EQ(float_from_fp8_e4m3(0x7E), 448.0F);
  EXPECT_EQ(float_from_fp8_e4m3(0x38), 1.0F);
  EXPECT_EQ(float_from_fp8_e4m3(0x01), 0.001953125F);
}

TEST(Fp8, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code < 256; ++code)
    EXPECT_EQ(fp8_e4m3_from_float(float_from_fp8_e4m3(static_cast<std::uint8_t>(code))), code);
}

TEST(Fp8, TiesAndTheirNeighboursGoToTheNearestEvenCode) {
  for (int code = 0; code < 0x7E; ++code) {
    const auto tie = static_cast<float>((value_of(code) + value_of(code + 1)) / 2);
    const int even = code % 2 == 0 ? code : code + 1;
    EXPECT_EQ(fp8_e4m3_from_float(tie), even);
    EXPECT_EQ(fp8_e4m3_from_float(-tie), even | 0x80);
    EXPECT_EQ(fp8_e4m3_from_float(std::nextafter(tie, 0.0F)), code);
    EXPECT_EQ(fp8_e4m3_from_float(std::nextafter(tie, kInf)), code + 1);
  }
}

TEST(Fp8, EncodesToTheNearestOfAllCodes) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; ++high) values.push_back(std::bit_cast<float>(high << 16));
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> exponent(-12.0F, 10.0F);
  for (int i = 0; i < 50'000; ++i) values.push_back(std::exp2(exponent(random)) * ((i & 1) != 0 ? -1.0F : 1.0F));
  for (int i = 0; i < 50'000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (float value : values)
    ASSERT_EQ(fp8_e4m3_from_float(value), nearest_code(value)) << std::bit_cast<std::uint32_t>(value);
}

TEST(Fp8, SaturatesAndKeepsNanAndSigns) {
  EXPECT_EQ(fp8_e4m3_from_float(448.0F), 0x7E);
  EXPECT_EQ(fp8_e4m3_from_float(464.0F), 0x7E);
  EXPECT_EQ(fp8_e4m3_from_float(1e30F), 0x7E);
  EXPECT_EQ(fp8_e4m3_from_float(kInf), 0x7E);
  EXPECT_EQ(fp8_e4m3_from_float(-kInf), 0xFE);
  EXPECT_EQ(fp8_e4m3_from_float(kNan), 0x7F);
  EXPECT_EQ(fp8_e4m3_from_float(-kNan), 0xFF);
  EXPECT_EQ(fp8_e4m3_from_float(-0.0F), 0x80);
  EXPECT_EQ(fp8_e4m3_from_float(std::numeric_limits<float>::denorm_min()), 0);
}

// ---- rows ----

/// One matrix through both directions. Outputs start as patterns, so that unwritten places show.
struct Quantised {
  std::int64_t num_tokens = 1;
  std::int64_t hidden = 0;
  std::vector<std::uint8_t> q;
  std::vector<float> scales;
  std::vector<std::uint8_t> ue8m0;
  std::vector<float> back;

  std::int64_t num_scales() const { return (hidden + 127) / 128; }
};

Quantised run(const std::vector<float>& x, std::int64_t hidden, Fp8ScaleFormat format) {
  Quantised result;
  result.hidden = hidden;
  result.num_tokens = static_cast<std::int64_t>(x.size()) / hidden;
  const std::int64_t tokens = result.num_tokens;
  result.q.assign(x.size(), 0xAA);
  result.scales.assign(static_cast<std::size_t>(tokens * result.num_scales()), -1.0F);
  result.ue8m0.assign(result.scales.size(), 0xAA);
  result.back.assign(x.size(), -1.0F);
  const bool bytes = format == Fp8ScaleFormat::kUe8m0;
  const TensorView scales = bytes ? TensorView(result.ue8m0.data(), DType::kUint8, {tokens, result.num_scales()})
                                  : TensorView(result.scales.data(), DType::kFloat32, {tokens, result.num_scales()});
  const TensorView q(result.q.data(), DType::kFloat8E4M3, {tokens, hidden});
  const Status status = quantize_fp8(ConstTensorView(x.data(), DType::kFloat32, {tokens, hidden}), q, scales, format);
  EXPECT_TRUE(status.ok()) << status.to_string();
  const Status back = dequantize_fp8(q, scales, TensorView(result.back.data(), DType::kFloat32, {tokens, hidden}));
  EXPECT_TRUE(back.ok()) << back.to_string();
  return result;
}

std::vector<float> random_rows(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

float amax_of(const std::vector<float>& x, std::int64_t hidden, std::int64_t row, std::int64_t block) {
  float amax = 1e-4F;
  for (std::int64_t col = block * 128; col < std::min(hidden, (block + 1) * 128); ++col)
    amax = std::fmax(amax, std::fabs(x[static_cast<std::size_t>(row * hidden + col)]));
  return amax;
}

class Fp8Rows : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(Fp8Rows, FloatScalesFollowTheFormula) {
  const std::int64_t hidden = GetParam();
  const std::vector<float> x = random_rows(static_cast<std::size_t>(3 * hidden), 2);
  const Quantised result = run(x, hidden, Fp8ScaleFormat::kFloat32);
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t col = 0; col < hidden; ++col) {
      const float amax = amax_of(x, hidden, row, col / 128);
      const auto at = static_cast<std::size_t>(row * hidden + col);
      const float scale = result.scales[static_cast<std::size_t>(row * result.num_scales() + col / 128)];
      ASSERT_EQ(scale, amax / 448.0F);
      ASSERT_EQ(result.q[at], nearest_code(x[at] * (448.0F / amax))) << at;
      ASSERT_EQ(result.back[at], static_cast<float>(value_of(result.q[at])) * scale);
      ASSERT_NEAR(result.back[at], x[at], amax / 16);
    }
  }
}

TEST_P(Fp8Rows, PowerOfTwoScalesAreTheSmallestThatFit) {
  const std::int64_t hidden = GetParam();
  const std::vector<float> x = random_rows(static_cast<std::size_t>(3 * hidden), 3);
  const Quantised power = run(x, hidden, Fp8ScaleFormat::kPowerOfTwo);
  const Quantised bytes = run(x, hidden, Fp8ScaleFormat::kUe8m0);
  EXPECT_EQ(power.q, bytes.q);
  EXPECT_EQ(power.back, bytes.back);
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t block = 0; block < power.num_scales(); ++block) {
      const auto at = static_cast<std::size_t>(row * power.num_scales() + block);
      const double ratio = static_cast<double>(amax_of(x, hidden, row, block)) / 448.0;
      int exponent = 0;
      EXPECT_EQ(std::frexp(power.scales[at], &exponent), 0.5F) << "not a power of two";
      EXPECT_GE(power.scales[at], ratio);
      EXPECT_LT(power.scales[at] / 2, ratio);
      EXPECT_EQ(bytes.ue8m0[at], exponent - 1 + 127);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hidden, Fp8Rows, ::testing::Values(1, 16, 127, 128, 129, 200, 512));

TEST(Fp8, PowerOfTwoScaleIsExactAroundEveryBoundary) {
  for (int exponent = -20; exponent < 100; ++exponent) {
    const float boundary = std::ldexp(448.0F, exponent);
    const auto scale_of = [](float amax) { return run({amax}, 1, Fp8ScaleFormat::kPowerOfTwo).scales[0]; };
    EXPECT_EQ(scale_of(boundary), std::ldexp(1.0F, exponent));
    EXPECT_EQ(scale_of(std::nextafter(boundary, 0.0F)), std::ldexp(1.0F, exponent));
    EXPECT_EQ(scale_of(std::nextafter(boundary, kInf)), std::ldexp(2.0F, exponent));
  }
}

TEST(Fp8, ZeroAndTinyBlocksUseTheFloor) {
  const Quantised zeros = run({0.0F, -0.0F}, 2, Fp8ScaleFormat::kFloat32);
  EXPECT_EQ(zeros.scales[0], 1e-4F / 448.0F);
  EXPECT_EQ(zeros.q, (std::vector<std::uint8_t>{0x00, 0x80}));
  const Quantised tiny = run({1e-4F, 1e-30F, -5e-5F}, 3, Fp8ScaleFormat::kFloat32);
  EXPECT_EQ(tiny.scales[0], 1e-4F / 448.0F);
  EXPECT_EQ(tiny.q[0], 0x7E);
  EXPECT_EQ(tiny.q[1], 0x00);
  EXPECT_EQ(tiny.q[2], nearest_code(-5e-5F * (448.0F / 1e-4F)));
}

TEST(Fp8, NanStaysNanAndDoesNotChangeTheScale) {
  for (Fp8ScaleFormat format : {Fp8ScaleFormat::kFloat32, Fp8ScaleFormat::kPowerOfTwo, Fp8ScaleFormat::kUe8m0}) {
    const Quantised with = run({kNan, 2.0F, -kNan, -1.0F}, 4, format);
    const Quantised without = run({0.0F, 2.0F, 0.0F, -1.0F}, 4, format);
    EXPECT_EQ(with.scales, without.scales);
    EXPECT_EQ(with.ue8m0, without.ue8m0);
    EXPECT_EQ(with.q, (std::vector<std::uint8_t>{0x7F, without.q[1], 0xFF, without.q[3]}));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(with.back[0]), 0x7FFFFFFFU);
    EXPECT_EQ(with.back[3], -1.0F);
  }
}

TEST(Fp8, AnInfiniteBlockBecomesNanWhereItIsInfiniteAndZeroElsewhere) {
  const Quantised result = run({kInf, 2.0F, -kInf, -1.0F}, 4, Fp8ScaleFormat::kFloat32);
  EXPECT_EQ(result.scales[0], kInf);
  EXPECT_EQ(result.q, (std::vector<std::uint8_t>{0x7F, 0x00, 0xFF, 0x80}));
  const Quantised bytes = run({kInf, 2.0F}, 2, Fp8ScaleFormat::kUe8m0);
  EXPECT_EQ(bytes.ue8m0[0], 255);
  EXPECT_TRUE(std::isnan(bytes.back[1])) << "E8M0 255 is NaN";
}

TEST(Fp8, LargestFiniteBlockQuantisesToTheLargestCode) {
  const float largest = std::numeric_limits<float>::max();
  const Quantised result = run({largest, -largest / 2}, 2, Fp8ScaleFormat::kFloat32);
  EXPECT_EQ(result.q, (std::vector<std::uint8_t>{0x7E, 0xF6}));
}

TEST(Fp8, StridesAndBfloat16AreHonoured) {
  constexpr std::int64_t kTokens = 4;
  constexpr std::int64_t kHidden = 260;
  constexpr std::int64_t kStride = 264;
  std::vector<float> x = random_rows(kTokens * kHidden, 4);
  std::vector<std::uint16_t> bf16(kTokens * kStride, 0x7FC1);
  for (std::int64_t row = 0; row < kTokens; ++row) {
    for (std::int64_t col = 0; col < kHidden; ++col) {
      const std::uint32_t bits =
          std::bit_cast<std::uint32_t>(x[static_cast<std::size_t>(row * kHidden + col)]) & 0xFFFF0000U;
      x[static_cast<std::size_t>(row * kHidden + col)] = std::bit_cast<float>(bits);
      bf16[static_cast<std::size_t>(row * kStride + col)] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
  const Quantised expected = run(x, kHidden, Fp8ScaleFormat::kFloat32);

  std::vector<std::uint8_t> q(kTokens * kStride, 0xAA);
  std::vector<float> scales(3 * 5, -1.0F);
  std::vector<std::uint16_t> back(kTokens * kStride, 0x7FC1);
  const TensorView q_view(q.data(), DType::kFloat8E4M3, {kTokens, kHidden}, {kStride, 1});
  const TensorView scales_view(scales.data(), DType::kFloat32, {kTokens, 3}, {1, 5});
  const TensorView back_view(back.data(), DType::kBfloat16, {kTokens, kHidden}, {kStride, 1});
  throw_if_error(quantize_fp8(ConstTensorView(bf16.data(), DType::kBfloat16, {kTokens, kHidden}, {kStride, 1}), q_view,
                              scales_view));
  throw_if_error(dequantize_fp8(q_view, scales_view, back_view));
  for (std::int64_t row = 0; row < kTokens; ++row) {
    for (std::int64_t col = 0; col < kStride; ++col) {
      const auto at = static_cast<std::size_t>(row * kStride + col);
      if (col >= kHidden) {
        EXPECT_EQ(q[at], 0xAA) << "gap between rows was written";
        EXPECT_EQ(back[at], 0x7FC1) << "gap between rows was written";
        continue;
      }
      const auto packed = static_cast<std::size_t>(row * kHidden + col);
      ASSERT_EQ(q[at], expected.q[packed]);
      const float value = std::bit_cast<float>(static_cast<std::uint32_t>(back[at]) << 16);
      ASSERT_LE(std::fabs(value - expected.back[packed]), std::fabs(expected.back[packed]) * 0x1p-8F);
    }
    for (std::int64_t block = 0; block < 3; ++block)
      EXPECT_EQ(scales[static_cast<std::size_t>(block * 5 + row)],
                expected.scales[static_cast<std::size_t>(row * 3 + block)]);
  }
  EXPECT_EQ(scales[4], -1.0F) << "gap between columns of scales was written";
}

TEST(Fp8, PackedExponentsAreThoseOfSingleBytes) {
  constexpr std::int64_t kTokens = 3;
  for (std::int64_t hidden : {1, 128, 512, 513, 700, 1024}) {
    const std::vector<float> x = random_rows(static_cast<std::size_t>(kTokens * hidden), 5);
    const Quantised expected = run(x, hidden, Fp8ScaleFormat::kUe8m0);
    const std::int64_t num_words = (hidden + 511) / 512;
    // Column-major, with one unused word in every column.
    constexpr std::int64_t kColumn = kTokens + 1;
    std::vector<std::uint32_t> words(static_cast<std::size_t>(num_words * kColumn), 0xAAAAAAAAU);
    std::vector<std::uint8_t> q(x.size(), 0xAA);
    std::vector<float> back(x.size(), -1.0F);
    const TensorView q_view(q.data(), DType::kFloat8E4M3, {kTokens, hidden});
    const TensorView scales(words.data(), DType::kInt32, {kTokens, num_words}, {1, kColumn});
    throw_if_error(quantize_fp8(ConstTensorView(x.data(), DType::kFloat32, {kTokens, hidden}), q_view, scales,
                                Fp8ScaleFormat::kUe8m0));
    throw_if_error(dequantize_fp8(q_view, scales, TensorView(back.data(), DType::kFloat32, {kTokens, hidden})));
    EXPECT_EQ(q, expected.q);
    EXPECT_EQ(back, expected.back);
    for (std::int64_t word = 0; word < num_words; ++word) {
      for (std::int64_t row = 0; row < kTokens; ++row) {
        std::uint32_t packed = 0;
        for (std::int64_t block = 4 * word; block < std::min(4 * word + 4, expected.num_scales()); ++block) {
          packed |=
              static_cast<std::uint32_t>(expected.ue8m0[static_cast<std::size_t>(row * expected.num_scales() + block)])
              << (block % 4 * 8);
        }
        EXPECT_EQ(words[static_cast<std::size_t>(word * kColumn + row)], packed) << hidden << " " << word;
      }
      EXPECT_EQ(words[static_cast<std::size_t>(word * kColumn + kTokens)], 0xAAAAAAAAU);
    }
  }
}

TEST(Fp8, WhereItRunsIsChecked) {
  std::vector<float> x(128, 1.0F);
  std::vector<std::uint8_t> q(128, 0xAA);
  float scale = -1.0F;
  const ConstTensorView x_view(x.data(), DType::kFloat32, {1, 128});
  const TensorView q_view(q.data(), DType::kFloat8E4M3, {1, 128});
  const TensorView scale_view(&scale, DType::kFloat32, {1, 1});
  const Status elsewhere = quantize_fp8(x_view, q_view, scale_view, Fp8ScaleFormat::kFloat32, {.backend = "abacus"});
  EXPECT_EQ(elsewhere.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(elsewhere.message().find("quantize_fp8: backend is \"abacus\""), std::string_view::npos);
  const Status stream = quantize_fp8(x_view, q_view, scale_view, Fp8ScaleFormat::kFloat32, {}, {&scale});
  EXPECT_EQ(stream.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(stream.message().find("has no streams"), std::string_view::npos);
  EXPECT_EQ(scale, -1.0F);
}

TEST(Fp8, NoTokensIsFine) {
  const Status status =
      quantize_fp8(ConstTensorView(nullptr, DType::kFloat32, {0, 128}),
                   TensorView(nullptr, DType::kFloat8E4M3, {0, 128}), TensorView(nullptr, DType::kFloat32, {0, 1}));
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Fp8, BadArgumentsAreRefusedAndNothingIsWritten) {
  std::vector<float> x(2 * 128, 1.0F);
  std::vector<std::uint8_t> q(2 * 128, 0xAA);
  std::vector<float> scales(4, -1.0F);
  const ConstTensorView good_x(x.data(), DType::kFloat32, {2, 128});
  const TensorView good_q(q.data(), DType::kFloat8E4M3, {2, 128});
  const TensorView good_scales(scales.data(), DType::kFloat32, {2, 1});
  struct Case {
    const char* mentions;
    ConstTensorView x;
    TensorView q;
    TensorView scales;
    Fp8ScaleFormat format = Fp8ScaleFormat::kFloat32;
  };
  const std::vector<Case> cases = {
      {"x is absent", {}, good_q, good_scales},
      {"q is absent", good_x, {}, good_scales},
      {"scales is absent", good_x, good_q, {}},
      {"x is i32", ConstTensorView(x.data(), DType::kInt32, {2, 128}), good_q, good_scales},
      {"x is [256]", ConstTensorView(x.data(), DType::kFloat32, {256}), good_q, good_scales},
      {"q is [2, 64]", good_x, TensorView(q.data(), DType::kFloat8E4M3, {2, 64}), good_scales},
      {"q is u8", good_x, TensorView(q.data(), DType::kUint8, {2, 128}), good_scales},
      {"scales is [2, 2]", good_x, good_q, TensorView(scales.data(), DType::kFloat32, {2, 2})},
      {"scales is u8", good_x, good_q, TensorView(scales.data(), DType::kUint8, {2, 1})},
      {"scales is i32", good_x, good_q, TensorView(scales.data(), DType::kInt32, {2, 1})},
      {"scales is f16", good_x, good_q, TensorView(scales.data(), DType::kFloat16, {2, 1})},
      {"scales is [2, 2], expected [2, 1]", good_x, good_q, TensorView(scales.data(), DType::kInt32, {2, 2}),
       Fp8ScaleFormat::kUe8m0},
      {"scales is f32", good_x, good_q, good_scales, Fp8ScaleFormat::kUe8m0},
      {"format is 7", good_x, good_q, good_scales, static_cast<Fp8ScaleFormat>(7)},
      {"inner stride 2", ConstTensorView(x.data(), DType::kFloat32, {1, 128}, {256, 2}),
       TensorView(q.data(), DType::kFloat8E4M3, {1, 128}), TensorView(scales.data(), DType::kFloat32, {1, 1})},
      {"q is of strides [64, 1]", good_x, TensorView(q.data(), DType::kFloat8E4M3, {2, 128}, {64, 1}), good_scales},
      {"x is a null pointer", ConstTensorView(nullptr, DType::kFloat32, {2, 128}), good_q, good_scales},
      {"q is a null pointer", good_x, TensorView(nullptr, DType::kFloat8E4M3, {2, 128}), good_scales},
      {"scales is at address", good_x, good_q,
       TensorView(reinterpret_cast<std::byte*>(scales.data()) + 1, DType::kFloat32, {2, 1})},
  };
  for (const Case& bad : cases) {
    const Status status = quantize_fp8(bad.x, bad.q, bad.scales, bad.format);
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << bad.mentions;
    EXPECT_NE(status.message().find(bad.mentions), std::string_view::npos) << status.message();
  }
  EXPECT_EQ(q, std::vector<std::uint8_t>(2 * 128, 0xAA));
  EXPECT_EQ(scales, std::vector<float>(4, -1.0F));
  EXPECT_FALSE(dequantize_fp8(good_q, good_scales, TensorView(x.data(), DType::kFloat16, {2, 128})).ok());
  EXPECT_EQ(x, std::vector<float>(2 * 128, 1.0F));
}

}  // namespace
}  // namespace ferry
