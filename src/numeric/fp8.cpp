#include "ferry/fp8.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <string_view>

#include "numeric/strided.hpp"

namespace ferry {
namespace {

using numeric::bad_argument;
using numeric::check_matrix;
using numeric::check_output_matrix;
using numeric::MatrixRule;

// Bit fields of IEEE 754 binary32 and of E4M3 (OCP 8-bit Floating Point Specification 1.0, table 1).
constexpr std::uint32_t kFloatMagnitude = 0x7FFFFFFFU;
constexpr std::uint32_t kFloatInfinity = 0x7F800000U;
constexpr std::uint32_t kFloatFraction = 0x007FFFFFU;
constexpr int kFloatFractionBits = 23;
constexpr std::uint32_t kFloatBias = 127;
constexpr std::uint32_t kFloatMaxExponent = 255;
constexpr std::uint32_t kFp8Magnitude = 0x7F;
constexpr std::uint32_t kFp8Nan = 0x7F;
constexpr int kFp8FractionBits = 3;
constexpr std::uint32_t kFp8Bias = 7;
constexpr float kFp8MinNormal = 0x1p-6F;
/// Its unit in the last place is 2^-9, the step of E4M3's subnormals: adding it rounds to that step.
constexpr float kSubnormalRounder = 0x1p14F;

constexpr std::uint16_t kBfloat16Nan = 0x7FFF;
constexpr std::uint32_t kFloatNan = 0x7FFFFFFFU;

constexpr auto kBlock = static_cast<std::size_t>(kFp8BlockSize);
using Block = std::array<float, kBlock>;

/// E4M3 code of |value|; `bits` are those of |value|. Free of branches, so that loops over it vectorise.
constexpr std::uint32_t encode_magnitude(std::uint32_t bits) {
  constexpr int kDroppedBits = kFloatFractionBits - kFp8FractionBits;
  constexpr std::uint32_t kRebias = (kFloatBias - kFp8Bias) << kFp8FractionBits;
  constexpr std::uint32_t kHalfBelow = (1U << (kDroppedBits - 1)) - 1;
  const std::uint32_t saturated = std::min(bits, std::bit_cast<std::uint32_t>(kFp8E4M3Max));
  const std::uint32_t odd = (saturated >> kDroppedBits) & 1U;
  const std::uint32_t normal = ((saturated + kHalfBelow + odd) >> kDroppedBits) - kRebias;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(saturated) + kSubnormalRounder) -
                                  std::bit_cast<std::uint32_t>(kSubnormalRounder);
  // Masks instead of conditions: compilers keep an addition of floats behind a branch, which would stop vectorisation.
  const std::uint32_t is_subnormal =
      0U - static_cast<std::uint32_t>(saturated < std::bit_cast<std::uint32_t>(kFp8MinNormal));
  const std::uint32_t is_nan = 0U - static_cast<std::uint32_t>(bits > kFloatInfinity);
  const std::uint32_t finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  return (kFp8Nan & is_nan) | (finite & ~is_nan);
}

constexpr std::uint32_t decode_bits(std::uint32_t code) {
  const std::uint32_t sign = (code & ~kFp8Magnitude) << 24;
  const std::uint32_t exponent = (code & kFp8Magnitude) >> kFp8FractionBits;
  const std::uint32_t fraction = code & ((1U << kFp8FractionBits) - 1);
  if ((code & kFp8Magnitude) == kFp8Nan) return sign | kFloatInfinity | (1U << (kFloatFractionBits - 1));
  if (exponent == 0) return sign | std::bit_cast<std::uint32_t>(static_cast<float>(fraction) * 0x1p-9F);
  return sign | ((exponent + kFloatBias - kFp8Bias) << kFloatFractionBits) |
         (fraction << (kFloatFractionBits - kFp8FractionBits));
}

constexpr std::array<float, 256> make_decode_table() {
  std::array<float, 256> table{};
  for (std::uint32_t code = 0; code < table.size(); ++code) table[code] = std::bit_cast<float>(decode_bits(code));
  return table;
}
constexpr std::array<float, 256> kDecodeTable = make_decode_table();

void load_block(const ConstTensorView& x, std::int64_t row, std::int64_t first, std::size_t count, Block& block) {
  const std::int64_t offset = row * x.stride(0) + first;
  if (x.dtype == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(x.data) + offset, count, block.begin());
    return;
  }
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x.data) + offset;
  for (std::size_t i = 0; i < count; ++i) block[i] = std::bit_cast<float>(static_cast<std::uint32_t>(from[i]) << 16);
}

/// Largest |value|, not below the floor. Positive floats order like their bits, and integers vectorise.
float block_amax(const Block& block, std::size_t count) {
  std::int32_t amax = std::bit_cast<std::int32_t>(kFp8AmaxFloor);
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(block[i]) & kFloatMagnitude);
    const std::int32_t number = magnitude > static_cast<std::int32_t>(kFloatInfinity) ? 0 : magnitude;
    amax = std::max(amax, number);
  }
  return std::bit_cast<float>(amax);
}

/// Biased exponent of the smallest power of two that is not below `value`, a positive normal number or infinity.
/// Dividing by 448 rounds no value across a power of two, so this is exact for amax / 448.
std::uint32_t ceil_exponent(float value) {
  return std::min((std::bit_cast<std::uint32_t>(value) + kFloatFraction) >> kFloatFractionBits, kFloatMaxExponent);
}

struct BlockScale {
  float multiplier = 1;          ///< of x, before it is rounded
  float stored = 1;              ///< kFloat32, kPowerOfTwo
  std::uint8_t stored_bits = 0;  ///< kUe8m0
};

BlockScale make_scale(float amax, Fp8ScaleFormat format) {
  BlockScale scale;
  if (format == Fp8ScaleFormat::kFloat32) {
    scale.multiplier = kFp8E4M3Max / amax;
    scale.stored = amax / kFp8E4M3Max;
    return scale;
  }
  const std::uint32_t exponent = ceil_exponent(amax / kFp8E4M3Max);
  scale.stored = std::bit_cast<float>(exponent << kFloatFractionBits);
  scale.multiplier = 1.0F / scale.stored;
  scale.stored_bits = static_cast<std::uint8_t>(exponent);
  return scale;
}

/// The sign is that of x, also where an infinite block maximum makes the product a NaN of unspecified sign.
void encode_block(const Block& block, std::size_t count, float multiplier, std::uint8_t* q) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(block[i]);
    const float magnitude = std::bit_cast<float>(bits & kFloatMagnitude) * multiplier;
    const std::uint32_t code = encode_magnitude(std::bit_cast<std::uint32_t>(magnitude) & kFloatMagnitude);
    q[i] = static_cast<std::uint8_t>(code | ((bits & ~kFloatMagnitude) >> 24));
  }
}

void store_scale(const TensorView& scales, std::int64_t row, std::int64_t col, const BlockScale& scale) {
  const std::int64_t offset = row * scales.stride(0) + col * scales.stride(1);
  if (scales.dtype == DType::kUint8) {
    static_cast<std::uint8_t*>(scales.data)[offset] = scale.stored_bits;
  } else {
    static_cast<float*>(scales.data)[offset] = scale.stored;
  }
}

float load_scale(const ConstTensorView& scales, std::int64_t row, std::int64_t col) {
  const std::int64_t offset = row * scales.stride(0) + col * scales.stride(1);
  if (scales.dtype == DType::kFloat32) return static_cast<const float*>(scales.data)[offset];
  const std::uint32_t exponent = static_cast<const std::uint8_t*>(scales.data)[offset];
  // E8M0 has no zero and no infinity: 0 is 2^-127, a subnormal of f32, and 255 is NaN.
  if (exponent == 0) return 0x1p-127F;
  if (exponent == kFloatMaxExponent) return std::bit_cast<float>(kFloatNan);
  return std::bit_cast<float>(exponent << kFloatFractionBits);
}

std::uint16_t bfloat16_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return std::isnan(value) ? kBfloat16Nan : static_cast<std::uint16_t>(rounded);
}

void store_value(const TensorView& x, std::int64_t offset, float value) {
  if (x.dtype == DType::kFloat32) {
    static_cast<float*>(x.data)[offset] = std::isnan(value) ? std::bit_cast<float>(kFloatNan) : value;
  } else {
    static_cast<std::uint16_t*>(x.data)[offset] = bfloat16_from_float(value);
  }
}

std::string dtype_text(const ConstTensorView& view) { return std::string(to_string(view.dtype)); }

Status check_inner_stride(const ConstTensorView& view, const MatrixRule& rule) {
  if (view.extent(1) <= 1 || view.stride(1) == 1) return {};
  return bad_argument(rule, fmt::format("of inner stride {}", view.stride(1)), "inner stride 1",
                      "make the channels of a row contiguous");
}

/// The three views of both directions; the direction decides which of `x` and `q` is read and which is written.
struct Fp8Arguments {
  std::string_view call;
  ConstTensorView x;
  ConstTensorView q;
  ConstTensorView scales;
  bool quantize = true;
};

Status validate(const Fp8Arguments& args) {
  const ConstTensorView& lead = args.quantize ? args.x : args.q;
  const std::string_view lead_name = args.quantize ? "x" : "q";
  if (lead.num_dims != 2 || lead.extent(0) < 0 || lead.extent(1) < 1)
    return bad_argument({args.call, lead_name}, lead.present() ? numeric::shape_text(lead) : "absent", "[T, H], H >= 1",
                        "give a two-dimensional view");
  const std::int64_t num_tokens = lead.extent(0);
  const std::int64_t hidden = lead.extent(1);
  const MatrixRule x_rule{args.call, "x", num_tokens, hidden};
  const MatrixRule q_rule{args.call, "q", num_tokens, hidden};
  const MatrixRule scales_rule{args.call, "scales", num_tokens, (hidden + kFp8BlockSize - 1) / kFp8BlockSize};

  const auto check = [](const ConstTensorView& view, const MatrixRule& rule, bool output) {
    return output ? check_output_matrix(view, rule) : check_matrix(view, rule);
  };
  if (Status status = check(args.x, x_rule, !args.quantize); !status.ok()) return status;
  if (Status status = check(args.q, q_rule, args.quantize); !status.ok()) return status;
  if (Status status = check(args.scales, scales_rule, args.quantize); !status.ok()) return status;
  if (args.x.dtype != DType::kBfloat16 && args.x.dtype != DType::kFloat32)
    return bad_argument(x_rule, dtype_text(args.x), "bf16 or f32", "convert it first");
  if (args.q.dtype != DType::kFloat8E4M3)
    return bad_argument(q_rule, dtype_text(args.q), "fp8_e4m3", "give a view of that dtype");
  if (args.scales.dtype != DType::kFloat32 && args.scales.dtype != DType::kUint8)
    return bad_argument(scales_rule, dtype_text(args.scales), "f32 or u8", "u8 scales are E8M0 exponents");
  if (Status status = check_inner_stride(args.x, x_rule); !status.ok()) return status;
  return check_inner_stride(args.q, q_rule);
}

Status check_format(const ConstTensorView& scales, Fp8ScaleFormat format) {
  const MatrixRule rule{"quantize_fp8", "scales"};
  switch (format) {
    case Fp8ScaleFormat::kFloat32:
    case Fp8ScaleFormat::kPowerOfTwo:
      if (scales.dtype == DType::kFloat32) return {};
      return bad_argument(rule, dtype_text(scales), "f32", "or pass kUe8m0");
    case Fp8ScaleFormat::kUe8m0:
      if (scales.dtype == DType::kUint8) return {};
      return bad_argument(rule, dtype_text(scales), "u8 for kUe8m0", "or pass kPowerOfTwo");
  }
  return bad_argument({"quantize_fp8", "format"}, std::to_string(static_cast<int>(format)),
                      "kFloat32, kPowerOfTwo or kUe8m0", "pass an enumerator");
}

}  // namespace

Status quantize_fp8(const ConstTensorView& x, const TensorView& q, const TensorView& scales, Fp8ScaleFormat format) {
  if (Status status = validate({"quantize_fp8", x, q, scales, true}); !status.ok()) return status;
  if (Status status = check_format(scales, format); !status.ok()) return status;
  const std::int64_t hidden = x.extent(1);
  Block block;
  for (std::int64_t row = 0; row < x.extent(0); ++row) {
    std::uint8_t* q_row = static_cast<std::uint8_t*>(q.data) + row * q.stride(0);
    for (std::int64_t first = 0; first < hidden; first += kFp8BlockSize) {
      const auto count = static_cast<std::size_t>(std::min(kFp8BlockSize, hidden - first));
      load_block(x, row, first, count, block);
      const BlockScale scale = make_scale(block_amax(block, count), format);
      encode_block(block, count, scale.multiplier, q_row + first);
      store_scale(scales, row, first / kFp8BlockSize, scale);
    }
  }
  return {};
}

Status dequantize_fp8(const ConstTensorView& q, const ConstTensorView& scales, const TensorView& x) {
  if (Status status = validate({"dequantize_fp8", x, q, scales, false}); !status.ok()) return status;
  const std::int64_t hidden = q.extent(1);
  for (std::int64_t row = 0; row < q.extent(0); ++row) {
    const std::uint8_t* q_row = static_cast<const std::uint8_t*>(q.data) + row * q.stride(0);
    for (std::int64_t first = 0; first < hidden; first += kFp8BlockSize) {
      const std::int64_t last = std::min(first + kFp8BlockSize, hidden);
      const float scale = load_scale(scales, row, first / kFp8BlockSize);
      for (std::int64_t col = first; col < last; ++col)
        store_value(x, row * x.stride(0) + col, kDecodeTable[q_row[col]] * scale);
    }
  }
  return {};
}

std::uint8_t fp8_e4m3_from_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint8_t>(encode_magnitude(bits & kFloatMagnitude) | ((bits & ~kFloatMagnitude) >> 24));
}

float float_from_fp8_e4m3(std::uint8_t bits) { return kDecodeTable[bits]; }

}  // namespace ferry
