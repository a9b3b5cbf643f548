#ifndef FERRY_NUMERIC_BLOCK_CODEC_HPP
#define FERRY_NUMERIC_BLOCK_CODEC_HPP

/// Arithmetic of quantised blocks, one value or one scale at a time. Host and kernels share it, so that both give the
/// same bits; both compile it without contracting products and sums, and without flushing subnormals.

#include <cstdint>

#include "ferry/fp8.hpp"
#include "ferry/int8.hpp"
#include "ferry/quantization.hpp"
#include "plan/host_device.hpp"

namespace ferry::numeric {

// Bit fields of IEEE 754 binary32 and of E4M3 (OCP 8-bit Floating Point Specification 1.0, table 1).
inline constexpr std::uint32_t kFloatMagnitude = 0x7FFFFFFFU;
inline constexpr std::uint32_t kFloatInfinity = 0x7F800000U;
inline constexpr std::uint32_t kFloatFraction = 0x007FFFFFU;
inline constexpr std::uint32_t kFloatNan = 0x7FFFFFFFU;
inline constexpr int kFloatFractionBits = 23;
inline constexpr std::uint32_t kFloatBias = 127;
inline constexpr std::uint32_t kFloatMaxExponent = 255;
inline constexpr std::uint32_t kFp8Magnitude = 0x7F;
inline constexpr std::uint32_t kFp8Nan = 0x7F;
inline constexpr int kFp8FractionBits = 3;
inline constexpr std::uint32_t kFp8Bias = 7;
inline constexpr float kFp8MinNormal = 0x1p-6F;
/// The unit in its last place is 2^-9, the step of E4M3's subnormals: adding it rounds to that step.
inline constexpr float kSubnormalRounder = 0x1p14F;
/// The unit in its last place is 1: adding it to a number from 0 to 2^22 rounds that number to an integer.
inline constexpr float kIntegerRounder = 0x1p23F;
inline constexpr std::uint16_t kBfloat16Nan = 0x7FFF;

FERRY_HOST_DEVICE constexpr std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
FERRY_HOST_DEVICE constexpr float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }
FERRY_HOST_DEVICE constexpr std::uint32_t lesser(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }

FERRY_HOST_DEVICE constexpr float float_from_bfloat16(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

/// E4M3 code of a magnitude, given as the bits of an f32. Free of branches, so that loops over it vectorise.
FERRY_HOST_DEVICE constexpr std::uint32_t encode_e4m3(std::uint32_t bits) {
  constexpr int kDroppedBits = kFloatFractionBits - kFp8FractionBits;
  constexpr std::uint32_t kRebias = (kFloatBias - kFp8Bias) << kFp8FractionBits;
  constexpr std::uint32_t kHalfBelow = (1U << (kDroppedBits - 1)) - 1;
  const std::uint32_t saturated = lesser(bits, bits_of(kFp8E4M3Max));
  const std::uint32_t odd = (saturated >> kDroppedBits) & 1U;
  const std::uint32_t normal = ((saturated + kHalfBelow + odd) >> kDroppedBits) - kRebias;
  const std::uint32_t subnormal = bits_of(float_of(saturated) + kSubnormalRounder) - bits_of(kSubnormalRounder);
  // Masks instead of conditions: compilers keep an addition of floats behind a branch, which would stop vectorisation.
  const std::uint32_t is_subnormal = 0U - static_cast<std::uint32_t>(saturated < bits_of(kFp8MinNormal));
  const std::uint32_t is_nan = 0U - static_cast<std::uint32_t>(bits > kFloatInfinity);
  const std::uint32_t finite = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  return (kFp8Nan & is_nan) | (finite & ~is_nan);
}

FERRY_HOST_DEVICE constexpr float decode_e4m3(std::uint32_t code) {
  const std::uint32_t sign = (code & ~kFp8Magnitude) << 24;
  const std::uint32_t exponent = (code & kFp8Magnitude) >> kFp8FractionBits;
  const std::uint32_t fraction = code & ((1U << kFp8FractionBits) - 1);
  if ((code & kFp8Magnitude) == kFp8Nan) return float_of(sign | kFloatInfinity | (1U << (kFloatFractionBits - 1)));
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-9F));
  return float_of(sign | ((exponent + kFloatBias - kFp8Bias) << kFloatFractionBits) |
                  (fraction << (kFloatFractionBits - kFp8FractionBits)));
}

/// Code of `x` in a block with this multiplier; x is given by its bits. The sign is that of x, also if an infinite
/// block maximum makes the product a NaN of unspecified sign.
FERRY_HOST_DEVICE constexpr std::uint8_t quantize_e4m3(std::uint32_t x, float multiplier) {
  const std::uint32_t magnitude = bits_of(float_of(x & kFloatMagnitude) * multiplier) & kFloatMagnitude;
  return static_cast<std::uint8_t>(encode_e4m3(magnitude) | ((x & ~kFloatMagnitude) >> 24));
}

/// i8 code of `x`, which is finite.
FERRY_HOST_DEVICE constexpr std::uint8_t quantize_int8(std::uint32_t x, float multiplier) {
  const std::uint32_t magnitude = lesser(bits_of(float_of(x & kFloatMagnitude) * multiplier), bits_of(kInt8Max));
  const std::uint32_t rounded = bits_of(float_of(magnitude) + kIntegerRounder) - bits_of(kIntegerRounder);
  const std::uint32_t is_negative = 0U - (x >> 31);
  return static_cast<std::uint8_t>((rounded ^ is_negative) - is_negative);
}

/// Bits of |x| as a block's maximum counts them. FP8 ignores NaNs; in i8 they must reach the scale.
FERRY_HOST_DEVICE constexpr std::uint32_t amax_candidate(std::uint32_t magnitude, bool is_int8) {
  return is_int8 || magnitude <= kFloatInfinity ? magnitude : 0;
}

struct BlockScale {
  float multiplier = 1;       ///< factor of x before rounding
  float stored = 1;           ///< value of f32 scales
  std::uint8_t exponent = 0;  ///< value of UE8M0 scales
  bool blank = false;         ///< i8: the scale is not finite, all q are 0
};

/// Scale of a block. `amax`: the bits of the block's largest magnitude, not below those of kQuantAmaxFloor.
FERRY_HOST_DEVICE constexpr BlockScale make_scale(std::uint32_t amax, Quantization mode) {
  BlockScale scale;
  if (mode == Quantization::kInt8) {
    scale.blank = amax >= kFloatInfinity;
    scale.stored = amax > kFloatInfinity ? float_of(kFloatNan) : float_of(amax) / kInt8Max;
    scale.multiplier = scale.blank ? 0.0F : kInt8Max / float_of(amax);
  } else if (mode == Quantization::kFp8) {
    scale.stored = float_of(amax) / kFp8E4M3Max;
    scale.multiplier = kFp8E4M3Max / float_of(amax);
  } else {
    // Biased exponent of the smallest power of two that is not below the quotient, which is normal or infinite.
    // Dividing by 448 rounds no value across a power of two, so this is exact.
    const std::uint32_t quotient = bits_of(float_of(amax) / kFp8E4M3Max);
    const std::uint32_t exponent = lesser((quotient + kFloatFraction) >> kFloatFractionBits, kFloatMaxExponent);
    scale.stored = float_of(exponent << kFloatFractionBits);
    scale.multiplier = 1.0F / scale.stored;
    scale.exponent = static_cast<std::uint8_t>(exponent);
  }
  return scale;
}

/// Value of an E8M0 exponent. E8M0 has no zero and no infinity: 0 is 2^-127, a subnormal of f32, and 255 is NaN.
FERRY_HOST_DEVICE constexpr float float_from_ue8m0(std::uint32_t exponent) {
  if (exponent == 0) return 0x1p-127F;
  if (exponent == kFloatMaxExponent) return float_of(kFloatNan);
  return float_of(exponent << kFloatFractionBits);
}

/// Bits of a value; any NaN becomes the canonical one.
FERRY_HOST_DEVICE constexpr std::uint32_t canonical_float(float value) {
  const std::uint32_t bits = bits_of(value);
  return (bits & kFloatMagnitude) > kFloatInfinity ? kFloatNan : bits;
}

FERRY_HOST_DEVICE constexpr std::uint16_t bfloat16_from_float(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return (bits & kFloatMagnitude) > kFloatInfinity ? kBfloat16Nan : static_cast<std::uint16_t>(rounded);
}

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_BLOCK_CODEC_HPP
