#include "ferry/int8.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace ferry {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One matrix through both directions. Outputs start as patterns, so that unwritten places show.
struct Quantised {
  std::vector<std::int8_t> q;
  std::vector<float> scales;
  std::vector<float> back;
};

Quantised run(const std::vector<float>& x, std::int64_t hidden) {
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / hidden;
  const std::int64_t num_scales = (hidden + 127) / 128;
  Quantised result{std::vector<std::int8_t>(x.size(), 0x55),
                   std::vector<float>(static_cast<std::size_t>(tokens * num_scales), -1.0F),
                   std::vector<float>(x.size(), -1.0F)};
  const TensorView q(result.q.data(), DType::kInt8, {tokens, hidden});
  const TensorView scales(result.scales.data(), DType::kFloat32, {tokens, num_scales});
  throw_if_error(quantize_int8(ConstTensorView(x.data(), DType::kFloat32, {tokens, hidden}), q, scales));
  throw_if_error(dequantize_int8(q, scales, TensorView(result.back.data(), DType::kFloat32, {tokens, hidden})));
  return result;
}

class Int8Rows : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(Int8Rows, FollowTheFormula) {
  const std::int64_t hidden = GetParam();
  const std::int64_t num_scales = (hidden + 127) / 128;
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(3 * hidden));
  for (float& value : x) value = normal(random);
  const Quantised result = run(x, hidden);
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t col = 0; col < hidden; ++col) {
      float amax = 1e-4F;
      for (std::int64_t other = col / 128 * 128; other < std::min(hidden, (col / 128 + 1) * 128); ++other) {
        amax = std::fmax(amax, std::fabs(x[static_cast<std::size_t>(row * hidden + other)]));
      }
      const auto at = static_cast<std::size_t>(row * hidden + col);
      const float scale = result.scales[static_cast<std::size_t>(row * num_scales + col / 128)];
      ASSERT_EQ(scale, amax / 127.0F);
      const float rounded = std::nearbyint(x[at] * (127.0F / amax));
      ASSERT_EQ(result.q[at], static_cast<int>(std::clamp(rounded, -127.0F, 127.0F))) << at;
      ASSERT_EQ(result.back[at], static_cast<float>(result.q[at]) * scale);
      ASSERT_NEAR(result.back[at], x[at], amax / 250);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Hidden, Int8Rows, ::testing::Values(1, 16, 127, 128, 129, 200, 512));

TEST(Int8, TiesGoToTheEvenNeighbour) {
  // The block's maximum makes the multiplier 1.
  std::vector<float> x{127.0F, -127.0F};
  for (int i = 0; i < 60; ++i) {
    x.push_back(static_cast<float>(i) + 0.5F);
    x.push_back(-static_cast<float>(i) - 0.5F);
  }
  const Quantised result = run(x, static_cast<std::int64_t>(x.size()));
  EXPECT_EQ(result.scales[0], 1.0F);
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_EQ(result.q[i], static_cast<int>(std::nearbyint(x[i]))) << x[i];
}

TEST(Int8, NoValueLeavesTheRangeWhateverTheMaximum) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20'000; ++i) {
    const float amax = std::bit_cast<float>(static_cast<std::uint32_t>(random() % 0x7F800000U));
    const Quantised result = run({amax, -amax}, 2);
    EXPECT_EQ(result.q[0], -result.q[1]);
    EXPECT_LE(result.q[0], 127);
    if (amax >= 1e-4F) {
      EXPECT_EQ(result.q[0], 127) << amax;
    }
  }
}

TEST(Int8, ZeroAndTinyBlocksUseTheFloor) {
  const Quantised zeros = run({0.0F, -0.0F}, 2);
  EXPECT_EQ(zeros.scales[0], 1e-4F / 127.0F);
  EXPECT_EQ(zeros.q, (std::vector<std::int8_t>{0, 0}));
  EXPECT_EQ(run({1e-30F, -1e-4F}, 2).q, (std::vector<std::int8_t>{0, -127}));
}

TEST(Int8, ABlockWithoutNumbersKeepsThatInItsScale) {
  std::vector<float> x(256, 1.0F);
  x[5] = kNan;
  x[6] = kInf;
  x[130] = -kInf;
  const Quantised result = run(x, 256);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(result.scales[0]), 0x7FFFFFFFU);
  EXPECT_EQ(result.scales[1], kInf);
  EXPECT_EQ(result.q, std::vector<std::int8_t>(256, 0));
  for (float value : result.back) EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0x7FFFFFFFU);
}

TEST(Int8, EveryCodeTimesItsScale) {
  std::vector<std::int8_t> q;
  for (int code = -128; code <= 127; ++code) q.push_back(static_cast<std::int8_t>(code));
  const std::vector<float> scales{0.37F, 3.0e4F};
  std::vector<std::uint16_t> x(256, 0xAAAA);
  throw_if_error(dequantize_int8(ConstTensorView(q.data(), DType::kInt8, {1, 256}),
                                 ConstTensorView(scales.data(), DType::kFloat32, {1, 2}),
                                 TensorView(x.data(), DType::kBfloat16, {1, 256})));
  for (std::size_t i = 0; i < 256; ++i) {
    const float exact = static_cast<float>(q[i]) * scales[i / 128];
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(x[i]) << 16);
    EXPECT_LE(std::fabs(value - exact), std::fabs(exact) * 0x1p-8F) << i;
  }
}

TEST(Int8, BadArgumentsAreRefusedAndNothingIsWritten) {
  std::vector<float> x(128, 1.0F);
  std::vector<std::int8_t> q(128, 0x55);
  std::vector<float> scales(1, -1.0F);
  const ConstTensorView good_x(x.data(), DType::kFloat32, {1, 128});
  const TensorView good_q(q.data(), DType::kInt8, {1, 128});
  const TensorView good_scales(scales.data(), DType::kFloat32, {1, 1});
  const auto expect_refused = [](const Status& status, const char* mentions) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << mentions;
    EXPECT_NE(status.message().find(mentions), std::string_view::npos) << status.message();
  };
  expect_refused(quantize_int8(good_x, TensorView(q.data(), DType::kFloat8E4M3, {1, 128}), good_scales),
                 "quantize_int8: q is fp8_e4m3, expected i8");
  expect_refused(quantize_int8(good_x, good_q, TensorView(scales.data(), DType::kUint8, {1, 1})),
                 "quantize_int8: scales is u8, expected f32");
  expect_refused(dequantize_int8(good_q, good_scales, TensorView(x.data(), DType::kInt32, {1, 128})),
                 "dequantize_int8: x is i32");
  expect_refused(dequantize_int8(good_q, good_scales, TensorView(x.data(), DType::kFloat32, {1, 64})),
                 "dequantize_int8: x is [1, 64], expected [1, 128]");
  EXPECT_EQ(q, std::vector<std::int8_t>(128, 0x55));
  EXPECT_EQ(scales[0], -1.0F);
}

}  // namespace
}  // namespace ferry
