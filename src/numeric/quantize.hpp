#ifndef FERRY_NUMERIC_QUANTIZE_HPP
#define FERRY_NUMERIC_QUANTIZE_HPP

/// Quantisation of rows with checked arguments: parameters for host and kernels, and the loops on the host.

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/quantization.hpp"
#include "ferry/types.hpp"
#include "plan/host_device.hpp"

namespace ferry::numeric {

/// Scales of rows: f32, u8 exponents, or i32 words of four. Strides in elements.
struct BlockScales {
  std::byte* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
};

/// Arguments of either direction; strides in elements, the channels of a row are contiguous.
struct QuantizeParams {
  Quantization mode = Quantization::kFp8;  ///< dequantising: kInt8, or any FP8 mode
  std::int64_t num_rows = 0;
  std::int64_t hidden = 0;
  void* x = nullptr;  ///< only read when quantising
  DType x_dtype = DType::kBfloat16;
  std::int64_t x_stride = 0;
  std::uint8_t* q = nullptr;  ///< only read when dequantising, like the scales
  std::int64_t q_stride = 0;
  BlockScales scales;
};

/// Number of blocks of a row.
FERRY_HOST_DEVICE constexpr std::int64_t num_blocks(std::int64_t hidden) {
  return (hidden + kQuantBlockSize - 1) / kQuantBlockSize;
}

/// Number of exponents in an i32.
inline constexpr std::int64_t kPackedScales = 4;

/// Number of columns of the scales of a row.
constexpr std::int64_t num_scale_columns(std::int64_t hidden, DType dtype) {
  return dtype == DType::kInt32 ? (num_blocks(hidden) + kPackedScales - 1) / kPackedScales : num_blocks(hidden);
}

constexpr DType quantized_dtype(Quantization mode) {
  return mode == Quantization::kInt8 ? DType::kInt8 : DType::kFloat8E4M3;
}

/// quantize_rows for one instruction set.
struct QuantizeVariant {
  const char* name = "";
  bool available = false;  ///< on this processor
  void (*to_fp8)(const QuantizeParams&) = nullptr;
  void (*to_int8)(const QuantizeParams&) = nullptr;
};

/// All variants, best first; the last is always available. They give the same bits.
std::span<const QuantizeVariant> quantize_variants();

void quantize_rows(const QuantizeParams& params);
void dequantize_rows(const QuantizeParams& params);

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_QUANTIZE_HPP
