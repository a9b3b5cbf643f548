#ifndef FERRY_FP8_HPP
#define FERRY_FP8_HPP

/// FP8 (OCP E4M3) quantisation with one scale per block of 128 channels, as MoE engines send it. Host memory only.

#include <cstdint>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Channels that share a scale. (DeepSeek-V3 technical report, section 3.3.2: 1x128 tiles of activations.)
inline constexpr std::int64_t kFp8BlockSize = 128;
/// Largest finite E4M3 value. (OCP 8-bit Floating Point Specification 1.0, table 2.)
inline constexpr float kFp8E4M3Max = 448.0F;
/// Smallest block maximum that a scale is made from, so that an all-zero block does not divide by zero.
/// (The value DeepEP's kernels and DeepGEMM's casts use; kept so that scales agree bit for bit.)
inline constexpr float kFp8AmaxFloor = 1e-4F;

/// How a block's scale is stored.
enum class Fp8ScaleFormat : std::int32_t {
  kFloat32 = 0,     ///< f32: amax / 448
  kPowerOfTwo = 1,  ///< f32: 2^ceil(log2(amax / 448))
  kUe8m0 = 2,       ///< u8: biased exponent (+127) of the power of two (OCP MX, E8M0)
};

/// Quantise rows. Per block amax = max(|x|, 1e-4), NaN ignored.
/// kFloat32: stores amax / 448; q = round-to-nearest-even, saturating, of x * (448 / amax), each operation rounded to
/// f32. kPowerOfTwo, kUe8m0: s = 2^ceil(log2(amax / 448)), exact; q of x * (1 / s).
/// NaN becomes 0x7F with its sign. An infinite amax stores an infinite scale (E8M0 255): infinities in that block
/// become NaN, other values signed zero.
/// @shape  x [T, H] bf16 | f32; q [T, H] kFloat8E4M3; scales [T, ceil(H/128)] f32 or u8 as `format`, any strides
/// @errors kInvalidArgument (shape, dtype, inner stride other than 1 in x or q); nothing is written
FERRY_API Status quantize_fp8(const ConstTensorView& x, const TensorView& q, const TensorView& scales,
                              Fp8ScaleFormat format = Fp8ScaleFormat::kFloat32);

/// x = q * scale in f32, rounded to the dtype of `x`; NaN becomes the canonical quiet NaN. Shapes and errors as
/// quantize_fp8; `format` follows the scales' dtype.
FERRY_API Status dequantize_fp8(const ConstTensorView& q, const ConstTensorView& scales, const TensorView& x);

/// Convert one value, rounding to nearest-even and saturating. For tests and tools.
FERRY_API std::uint8_t fp8_e4m3_from_float(float value);
FERRY_API float float_from_fp8_e4m3(std::uint8_t bits);

}  // namespace ferry

#endif  // FERRY_FP8_HPP
