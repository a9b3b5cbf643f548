#include "cpu/rows/wire_rows.hpp"

#include <algorithm>
#include <cstring>

#include "numeric/block_codec.hpp"
#include "numeric/quantize.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

/// Parameters for one row in either direction.
numeric::QuantizeParams row_params(std::int64_t hidden, void* x, DType x_dtype, std::byte* wire) {
  return {.mode = Quantization::kFp8,
          .num_rows = 1,
          .hidden = hidden,
          .x = x,
          .x_dtype = x_dtype,
          .x_stride = 0,
          .q = reinterpret_cast<std::uint8_t*>(wire),
          .q_stride = 0,
          .scales = {.data = wire + hidden, .dtype = DType::kFloat32, .row_stride = 0, .column_stride = 1}};
}

void load_bias(const std::byte* bias, DType dtype, std::int64_t hidden, float* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, bias, to_size(hidden) * sizeof(float));
    return;
  }
  const auto* const bits = reinterpret_cast<const std::uint16_t*>(bias);
  std::transform(bits, bits + hidden, to, numeric::float_from_bfloat16);
}

}  // namespace

std::int64_t fp8_wire_row_bytes(std::int64_t hidden) {
  const std::int64_t bytes = hidden + numeric::num_blocks(hidden) * static_cast<std::int64_t>(sizeof(float));
  return (bytes + kRowGranuleBytes - 1) / kRowGranuleBytes * kRowGranuleBytes;
}

void quantize_wire_row(const CombineCall& call, std::int64_t row_idx, std::byte* wire) {
  // The input is only read.
  auto* const row = const_cast<std::byte*>(call.x.row(row_idx));
  numeric::quantize_rows(row_params(hidden_of(call), row, call.x.dtype, wire));
}

void WireSum::sum(const RowSum& terms, std::size_t num_biases) {
  const std::size_t width = to_size(hidden_);
  values_.resize((terms.num_rows + 1) * width);
  rows_.clear();
  for (std::size_t i = 0; i < terms.num_rows; ++i) {
    float* const values = values_.data() + i * width;
    if (i < num_biases) {
      load_bias(terms.rows[i], dtype_, hidden_, values);
    } else {
      auto* const wire = const_cast<std::byte*>(terms.rows[i]);  // only read
      numeric::dequantize_rows(row_params(hidden_, values, DType::kFloat32, wire));
    }
    rows_.push_back(reinterpret_cast<const std::byte*>(values));
  }
  float* const sums = values_.data() + terms.num_rows * width;
  const bool rounds = dtype_ == DType::kBfloat16;
  const RowSumFunction sum_row = choose_row_sum(DType::kFloat32);
  sum_row({.rows = rows_.data(),
           .weights = terms.weights,
           .num_rows = terms.num_rows,
           .out = rounds ? reinterpret_cast<std::byte*>(sums) : terms.out,
           .row_bytes = width * sizeof(float)});
  if (!rounds) return;
  std::transform(sums, sums + width, reinterpret_cast<std::uint16_t*>(terms.out), numeric::bfloat16_from_float);
}

}  // namespace ferry::cpu
