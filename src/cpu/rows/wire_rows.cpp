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

void load_row(const std::byte* row, DType dtype, std::size_t width, float* to) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, row, width * sizeof(float));
    return;
  }
  const auto* const bits = reinterpret_cast<const std::uint16_t*>(row);
  std::transform(bits, bits + width, to, numeric::float_from_bfloat16);
}

void store_bfloat16(const float* from, std::size_t width, std::byte* to) {
  std::transform(from, from + width, reinterpret_cast<std::uint16_t*>(to), numeric::bfloat16_from_float);
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
      load_row(terms.rows[i], dtype_, width, values);
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
  if (rounds) store_bfloat16(sums, width, terms.out);
}

void WireSum::sum_groups(const RowSum& terms) {
  const std::size_t width = terms.row_bytes / size_bytes(DType::kBfloat16);
  const std::size_t row_bytes = width * sizeof(float);
  const auto hidden = static_cast<std::int64_t>(width);
  values_.resize((terms.num_rows + terms.num_groups + 1) * width);
  wire_.resize(to_size(fp8_wire_row_bytes(hidden)));
  rows_.clear();
  for (std::size_t i = 0; i < terms.num_rows; ++i) {
    float* const values = values_.data() + i * width;
    load_row(terms.rows[i], DType::kBfloat16, width, values);
    rows_.push_back(reinterpret_cast<const std::byte*>(values));
  }
  const RowSumFunction sum_row = choose_row_sum(DType::kFloat32);
  std::size_t first = 0;
  for (std::size_t group = 0; group < terms.num_groups; ++group) {
    float* const sum = values_.data() + (terms.num_rows + group) * width;
    auto* const bytes = reinterpret_cast<std::byte*>(sum);
    const std::size_t end = terms.group_ends[group];
    sum_row({rows_.data() + first, terms.weights + first, end - first, bytes, row_bytes});
    const numeric::QuantizeParams params = row_params(hidden, sum, DType::kFloat32, wire_.data());
    numeric::quantize_rows(params);
    numeric::dequantize_rows(params);
    rows_.push_back(bytes);
    first = end;
  }
  float* const total = values_.data() + (terms.num_rows + terms.num_groups) * width;
  sum_row({rows_.data() + terms.num_rows, nullptr, terms.num_groups, reinterpret_cast<std::byte*>(total), row_bytes});
  store_bfloat16(total, width, terms.out);
}

}  // namespace ferry::cpu
