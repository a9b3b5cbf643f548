#ifndef FERRY_QUANTIZATION_H
#define FERRY_QUANTIZATION_H

/// C interface: rows to FP8 and INT8 and back (ferry/fp8.hpp, ferry/int8.hpp). Include ferry/ferry.h.

#include "ferry/ferry_base.h"

// NOLINTBEGIN(readability-identifier-naming): C has no namespaces
#ifdef __cplusplus
extern "C" {
#endif

/// ferry::Fp8ScaleFormat.
enum { FERRY_FP8_SCALE_FLOAT32 = 0, FERRY_FP8_SCALE_POWER_OF_TWO = 1, FERRY_FP8_SCALE_UE8M0 = 2 };

/// Quantise rows to one byte per channel and a scale per 128 channels, and back. x: [T, H] bf16 | f32; q: [T, H];
/// scales: [T, ceil(H/128)] f32 (u8, or [T, ceil(H/512)] i32, for UE8M0). Need no group.
FERRY_C_API ferry_status* ferry_quantize_fp8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                             int32_t scale_format, const ferry_execution_options* options,
                                             void* stream);
FERRY_C_API ferry_status* ferry_dequantize_fp8(const ferry_tensor* q, const ferry_tensor* scales, const ferry_tensor* x,
                                               const ferry_execution_options* options, void* stream);
FERRY_C_API ferry_status* ferry_quantize_int8(const ferry_tensor* x, const ferry_tensor* q, const ferry_tensor* scales,
                                              const ferry_execution_options* options, void* stream);
FERRY_C_API ferry_status* ferry_dequantize_int8(const ferry_tensor* q, const ferry_tensor* scales,
                                                const ferry_tensor* x, const ferry_execution_options* options,
                                                void* stream);

#ifdef __cplusplus
}  // extern "C"
#endif
// NOLINTEND(readability-identifier-naming)

#endif  // FERRY_QUANTIZATION_H
