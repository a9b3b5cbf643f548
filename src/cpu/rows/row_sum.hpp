#ifndef FERRY_CPU_ROWS_ROW_SUM_HPP
#define FERRY_CPU_ROWS_ROW_SUM_HPP

/// Sums of combine. Compiled once per instruction set; the widest that the machine supports is chosen at run time. All
/// give the same bits.

#include <cstddef>
#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::cpu {

/// Sum of one token: out = round(((+0 + rows[0]) + rows[1]) + …) element by element in f32, or with fma(weights[i],
/// rows[i], acc) if weights are given. NaN becomes canonical.
struct RowSum {
  const std::byte* const* rows = nullptr;
  const float* weights = nullptr;  ///< one per row, or null
  std::size_t num_rows = 0;
  std::byte* out = nullptr;
  std::size_t row_bytes = 0;  ///< a multiple of 16
  /// If given, with weights, sums in two steps (CombineOrder::kRankSums): rows are summed and rounded by group, then
  /// these sums are added, from +0 in f32, and rounded. Each entry is the index after a group's last row.
  const std::size_t* group_ends = nullptr;
  std::size_t num_groups = 0;
};

using RowSumFunction = void (*)(const RowSum&);

/// Best implementation on this machine for bf16 or f32 rows.
RowSumFunction choose_row_sum(DType dtype);

/// Implementation, exposed for tests that compare all of them.
struct RowSumVariant {
  const char* name = nullptr;
  bool available = false;  ///< this machine has the instructions
  RowSumFunction bf16 = nullptr;
  RowSumFunction f32 = nullptr;
};

/// Implementations, best first; the last one is always available. `count` receives their number.
const RowSumVariant* row_sum_variants(std::size_t* count);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_ROW_SUM_HPP
