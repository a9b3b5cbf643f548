#ifndef FERRY_CPU_ROWS_ROW_SUM_HPP
#define FERRY_CPU_ROWS_ROW_SUM_HPP

/// The sums of combine. Compiled once per instruction set; the widest that the machine supports is chosen at run time,
/// and all give the same bits.

#include <cstddef>
#include <cstdint>

#include "ferry/types.hpp"

namespace ferry::cpu {

/// One token's sum: out = round(((+0 + rows[0]) + rows[1]) + …) element by element in f32, or with fma(weights[i],
/// rows[i], acc) if weights are given. NaN becomes canonical.
struct RowSum {
  const std::byte* const* rows = nullptr;
  const float* weights = nullptr;  ///< one per row, or null
  std::size_t num_rows = 0;
  std::byte* out = nullptr;
  std::size_t row_bytes = 0;  ///< a multiple of 16
  /// If given, with weights, in two steps (CombineOrder::kRankSums): rows are summed and rounded by group, then those
  /// sums are added, from +0 in f32, and rounded. Each is the index of the row behind a group's last.
  const std::size_t* group_ends = nullptr;
  std::size_t num_groups = 0;
};

using RowSumFunction = void (*)(const RowSum&);

/// The best implementation on this machine for bf16 or f32 rows.
RowSumFunction choose_row_sum(DType dtype);

/// Each implementation, for tests that compare them.
struct RowSumVariant {
  const char* name = nullptr;
  bool available = false;  ///< whether this machine has the instructions
  RowSumFunction bf16 = nullptr;
  RowSumFunction f32 = nullptr;
};

/// Best first; the last is always available. `count` receives their number.
const RowSumVariant* row_sum_variants(std::size_t* count);

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_ROW_SUM_HPP
