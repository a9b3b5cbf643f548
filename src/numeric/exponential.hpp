#ifndef FERRY_NUMERIC_EXPONENTIAL_HPP
#define FERRY_NUMERIC_EXPONENTIAL_HPP

/// The library's own exponential, with the same bits on hosts and GPUs whatever their compilers' libraries return:
/// fused multiply-adds, which IEEE 754 defines to the bit, and integer operations. Free of branches, so that loops over
/// it vectorise.

#include <cstdint>

#include "numeric/block_codec.hpp"
#include "plan/host_device.hpp"

namespace ferry::numeric {

/// a * b + c, rounded once.
FERRY_HOST_DEVICE inline float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// e^x = 2^n * e^r with n = round(x / ln 2) and |r| <= ln 2 / 2.
inline constexpr float kLog2E = 0x1.715476p+0F;
/// Adding it rounds to an integer, which is then in the low bits of the sum.
inline constexpr float kExponentRounder = 0x1.8p23F;
/// ln 2 as a sum of two f32.
inline constexpr float kLn2High = 0x1.62e43p-1F;
inline constexpr float kLn2Low = -0x1.05c61p-29F;
/// (e^r - 1 - r) / r^2 over that range, ascending powers: minimax by Remez exchange under the weight r^2 / e^r, which
/// makes it the relative error of e^r, then rounded to f32 (scripts/fit_exponential.py). The remaining error is 3.7e-9.
inline constexpr float kTerm2 = 0x1.fffffcp-2F;
inline constexpr float kTerm3 = 0x1.555492p-3F;
inline constexpr float kTerm4 = 0x1.5558f2p-5F;
inline constexpr float kTerm5 = 0x1.123a2p-7F;
inline constexpr float kTerm6 = 0x1.6a23cep-10F;
/// Below it the result is 0, so that no subnormal appears, which a processor may be set to flush.
inline constexpr float kExponentialFloor = -87.0F;

/// All bits or none. Compilers keep an operation on floats behind a branch, which would stop vectorisation.
FERRY_HOST_DEVICE inline std::uint32_t mask_of(bool condition) { return 0U - static_cast<std::uint32_t>(condition); }

/// exponential(x) for x not below kExponentialFloor.
FERRY_HOST_DEVICE inline float exponential_above_floor(float x) {
  const float shifted = fused_multiply_add(x, kLog2E, kExponentRounder);
  const float n = shifted - kExponentRounder;
  const float r = fused_multiply_add(n, -kLn2Low, fused_multiply_add(n, -kLn2High, x));
  float sum = fused_multiply_add(kTerm6, r, kTerm5);
  sum = fused_multiply_add(sum, r, kTerm4);
  sum = fused_multiply_add(sum, r, kTerm3);
  sum = fused_multiply_add(sum, r, kTerm2);
  // r + r^2 * sum; its error is small beside the 1 that is added last.
  const float above_one = fused_multiply_add(r * r, sum, r);
  return float_of(bits_of(1.0F + above_one) + (bits_of(shifted) << kFloatFractionBits));
}

/// e^x for x <= 0, within 1.01 units in the last place (all values were tested); 1 for 0, 0 below kExponentialFloor and
/// for NaN.
FERRY_HOST_DEVICE inline float exponential(float x) {
  return float_of(bits_of(exponential_above_floor(x)) & mask_of(x >= kExponentialFloor));
}

/// 1 / x for x in [1, 2], rounded once.
FERRY_HOST_DEVICE inline float reciprocal_of_one_to_two(float x) {
#if defined(__CUDA_ARCH__)
  // The steps of __frcp_rn for x and results far from the ends of the exponent range, without the branch to its other
  // case, which keeps a loop's iterations from being interleaved.
  float estimate = 0;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
  return __fmaf_rn(estimate, __fmaf_rn(-x, estimate, 1.0F), estimate);
#else
  return 1.0F / x;
#endif
}

/// sigmoid(x) from e^-|x|.
FERRY_HOST_DEVICE inline float sigmoid_from(float x, float small) {
  const float inverse = reciprocal_of_one_to_two(1.0F + small);
  const std::uint32_t positive = mask_of(x >= 0.0F);
  return float_of((bits_of(inverse) & positive) | (bits_of(small * inverse) & ~positive));
}

/// 1 / (1 + e^-x) for any x, below zero e^x * (1 / (1 + e^x)), each operation rounded; 0 for NaN.
FERRY_HOST_DEVICE inline float sigmoid(float x) {
  return sigmoid_from(x, exponential(-float_of(bits_of(x) & kFloatMagnitude)));
}

/// sigmoid(x) for |x| not above -kExponentialFloor.
FERRY_HOST_DEVICE inline float sigmoid_above_floor(float x) {
  return sigmoid_from(x, exponential_above_floor(-float_of(bits_of(x) & kFloatMagnitude)));
}

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_EXPONENTIAL_HPP
