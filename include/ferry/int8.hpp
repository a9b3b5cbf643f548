#ifndef FERRY_INT8_HPP
#define FERRY_INT8_HPP

/// Symmetric INT8 quantisation with one f32 scale per block of 128 channels.

#include "ferry/export.hpp"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Largest magnitude; -128 is not used, so that -x becomes -q.
inline constexpr float kInt8Max = 127.0F;

/// Quantise rows. Per block amax = max(|x|, 1e-4): stores amax / 127; q = round-to-nearest-even of x * (127 / amax),
/// clamped to [-127, 127], each operation rounded to f32.
/// i8 has no NaN and no infinity, so the scale represents them: a block with a NaN stores the scale NaN (0x7FFFFFFF),
/// else a block with an infinity stores an infinite one; all its q are 0. Dequantised, the whole block is NaN.
/// @shape  x [T, H] bf16 | f32; q [T, H] kInt8; scales [T, ceil(H/128)] f32, any strides
/// @sync   as ExecutionOptions::backend says
/// @errors as quantize_fp8
FERRY_API Status quantize_int8(const ConstTensorView& x, const TensorView& q, const TensorView& scales,
                               const ExecutionOptions& options = {}, Stream stream = {});

/// x = q * scale in f32, rounded to the dtype of `x`; NaN becomes the canonical quiet NaN. Shapes and errors as
/// quantize_int8.
FERRY_API Status dequantize_int8(const ConstTensorView& q, const ConstTensorView& scales, const TensorView& x,
                                 const ExecutionOptions& options = {}, Stream stream = {});

}  // namespace ferry

#endif  // FERRY_INT8_HPP
