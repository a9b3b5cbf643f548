#include "cpu/local/expansion.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "cpu/rows/row_sum.hpp"
#include "ferry/routing.hpp"
#include "numeric/block_codec.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu {
namespace {

void copy_scales(const plan::ExpandParams& params, std::int64_t row, std::int64_t slot) {
  for (std::int64_t i = 0; i < params.num_scales; ++i) params.out_scales.at(slot, i) = params.scales.at(row, i);
}

void clear_row(const plan::ExpandParams& params, std::int64_t slot) {
  std::memset(params.out_x + slot * params.row_bytes, 0, to_size(params.row_bytes));
  for (std::int64_t i = 0; i < params.num_scales; ++i) params.out_scales.at(slot, i) = 0;
}

/// Rows that a row's slots name, in the order of choices.
struct NamedRows {
  std::array<const std::byte*, kMaxTopk> rows;
  std::size_t num_rows = 0;

  NamedRows(const plan::ReduceParams& params, std::int64_t row) {
    const std::int64_t row_bytes = params.hidden * static_cast<std::int64_t>(sizeof(std::uint16_t));
    for (int k = 0; k < params.table.num_topk; ++k) {
      const std::int32_t slot = params.table.slot(row, k);
      if (slot >= 0) rows[num_rows++] = params.x + slot * row_bytes;
    }
  }
};

/// Unrounded sums in f32.
void sum_exactly(const NamedRows& named, std::int64_t hidden, float* out) {
  std::fill_n(out, hidden, 0.0F);
  for (std::size_t at = 0; at < named.num_rows; ++at) {
    const std::byte* const row = named.rows[at];
    for (std::int64_t i = 0; i < hidden; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, row + i * static_cast<std::int64_t>(sizeof(bits)), sizeof(bits));
      out[i] += numeric::float_from_bfloat16(bits);
    }
  }
  for (std::int64_t i = 0; i < hidden; ++i) {
    if (out[i] != out[i]) out[i] = numeric::float_of(numeric::kFloatNan);
  }
}

}  // namespace

void expand_rows(const plan::ExpandParams& params) {
  const plan::SlotTable& table = params.table;
  if (params.row_of_slot != nullptr) std::fill_n(params.row_of_slot, table.num_slots, -1);
  if (params.out_weights != nullptr) std::fill_n(params.out_weights, table.num_slots, 0.0F);
  for (std::int64_t row = 0; row < table.num_rows; ++row) {
    for (int k = 0; k < table.num_topk; ++k) {
      const std::int32_t slot = table.slot(row, k);
      if (slot < 0) continue;
      // Plain copy, which does not bypass the caches: the pages of new outputs have just been cleared through the
      // caches. (29 MB in new pages: 12.5 ms, streamed 18; in used pages 1.3 and 1.5.)
      std::memcpy(params.out_x + slot * params.row_bytes, params.x + row * params.row_bytes, to_size(params.row_bytes));
      copy_scales(params, row, slot);
      if (params.out_weights != nullptr) params.out_weights[slot] = params.slot_weight(row, k);
      if (params.row_of_slot != nullptr) params.row_of_slot[slot] = static_cast<std::int32_t>(row);
    }
  }
  for (std::int64_t slot = 0; params.zero_padding && slot < table.num_slots; ++slot) {
    if (params.row_of_slot[slot] < 0) clear_row(params, slot);
  }
}

void reduce_rows(const plan::ReduceParams& params) {
  const plan::SlotTable& table = params.table;
  const RowSumFunction sum = choose_row_sum(DType::kBfloat16);
  const std::size_t row_bytes = to_size(params.hidden) * sizeof(std::uint16_t);
  for (std::int64_t row = 0; row < table.num_rows; ++row) {
    const NamedRows named(params, row);
    if (params.rounds) {
      sum({named.rows.data(), nullptr, named.num_rows, params.out_x + row * static_cast<std::int64_t>(row_bytes),
           row_bytes});
    } else {
      sum_exactly(named, params.hidden, reinterpret_cast<float*>(params.out_x) + row * params.hidden);
    }
    for (int k = 0; params.out_weights != nullptr && k < table.num_topk; ++k) {
      params.out_weights[row * table.num_topk + k] = params.choice_weight(row, k);
    }
  }
}

}  // namespace ferry::cpu
