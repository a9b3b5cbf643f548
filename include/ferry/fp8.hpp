#ifndef FERRY_FP8_HPP
#define FERRY_FP8_HPP

/// FP8 (OCP E4M3) quantisation with one scale per block of 128 channels, the format that MoE engines send.

#include <cstdint>

#include "ferry/export.hpp"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

inline constexpr std::int64_t kFp8BlockSize = kQuantBlockSize;
/// Largest finite E4M3 value. (OCP 8-bit Floating Point Specification 1.0, table 2.)
inline constexpr float kFp8E4M3Max = 448.0F;
inline constexpr float kFp8AmaxFloor = kQuantAmaxFloor;

/// Storage format of a block's scale.
enum class Fp8ScaleFormat : std::int32_t {
  kFloat32 = 0,     ///< f32: amax / 448
  kPowerOfTwo = 1,  ///< f32: 2^ceil(log2(amax / 448))
  kUe8m0 = 2,       ///< u8: biased exponent (+127) of kPowerOfTwo's scale (OCP MX, E8M0); or i32: four of them
};

/// Quantise rows. Per block amax = max(|x|, 1e-4), NaN ignored.
/// kFloat32: stores amax / 448; q = round-to-nearest-even, saturating, of x * (448 / amax), each operation rounded to
/// f32. kPowerOfTwo, kUe8m0: s = 2^ceil(log2(amax / 448)), exact; q of x * (1 / s).
/// NaN becomes 0x7F with its sign. An infinite amax stores an infinite scale (E8M0 255): infinities in that block
/// become NaN, other values signed zero.
/// @shape  x [T, H] bf16 | f32; q [T, H] kFloat8E4M3; scales, any strides: [T, ceil(H/128)] f32 or u8 as `format`; or
///         for kUe8m0 [T, ceil(H/512)] i32, where byte j of word w is the exponent of block 4w + j, 0 past the last
/// @sync   as ExecutionOptions::backend says
/// @errors kInvalidArgument (shape, dtype, inner stride other than 1 in x or q, memory that the backend cannot use);
///         kUnsupported: this build has no such backend. Nothing is written in either case. kCuda: the launch failed
FERRY_API Status quantize_fp8(const ConstTensorView& x, const TensorView& q, const TensorView& scales,
                              Fp8ScaleFormat format = Fp8ScaleFormat::kFloat32, const ExecutionOptions& options = {},
                              Stream stream = {});

/// x = q * scale in f32, rounded to the dtype of `x`; NaN becomes the canonical quiet NaN. Shapes and errors as
/// quantize_fp8; `format` follows the scales' dtype.
FERRY_API Status dequantize_fp8(const ConstTensorView& q, const ConstTensorView& scales, const TensorView& x,
                                const ExecutionOptions& options = {}, Stream stream = {});

/// Convert one value, rounding to nearest-even and saturating. For tests and tools.
FERRY_API std::uint8_t fp8_e4m3_from_float(float value);
FERRY_API float float_from_fp8_e4m3(std::uint8_t bits);

}  // namespace ferry

#endif  // FERRY_FP8_HPP
