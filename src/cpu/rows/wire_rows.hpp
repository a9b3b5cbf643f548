#ifndef FERRY_CPU_ROWS_WIRE_ROWS_HPP
#define FERRY_CPU_ROWS_WIRE_ROWS_HPP

/// Rows of a combine with WireFormat::kFp8, as they lie in staging: the codes of H channels, one f32 scale for each
/// block of them, and a gap up to a multiple of kRowGranuleBytes. Sums of ranks (CombineCall::rank_sums) get their
/// values from such rows too, where they are summed; ranks read the terms as given.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/backend.hpp"
#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {

/// Bytes of a row with `hidden` channels, a multiple of kQuantBlockSize.
std::int64_t fp8_wire_row_bytes(std::int64_t hidden);

/// H of a combine.
inline std::int64_t hidden_of(const CombineCall& call) {
  return call.x.row_bytes / static_cast<std::int64_t>(size_bytes(call.x.dtype));
}

/// Whether other ranks read wire rows.
inline bool quantizes_rows(const CombineCall& call) { return call.wire_format == WireFormat::kFp8 && !call.rank_sums; }

/// Bytes of a row as other ranks read it.
inline std::int64_t wire_row_bytes(const CombineCall& call) {
  return quantizes_rows(call) ? fp8_wire_row_bytes(hidden_of(call)) : call.x.row_bytes;
}

/// Quantises row `row_idx` of the call's input to `wire`.
void quantize_wire_row(const CombineCall& call, std::int64_t row_idx, std::byte* wire);

/// Sums tokens whose rows, or whose sums of ranks, are quantised. One object serves one token after another and keeps
/// its memory.
class WireSum {
 public:
  explicit WireSum(const CombineCall& call) : dtype_(call.x.dtype), hidden_(hidden_of(call)) {}

  /// As RowSumFunction. The first `num_biases` rows have the dtype of the output, the others are wire rows.
  void sum(const RowSum& terms, std::size_t num_biases);
  /// As RowSumFunction with groups, except that the sums of groups are quantised instead of rounded. The rows are bf16,
  /// and may be whole blocks of longer rows.
  void sum_groups(const RowSum& terms);

 private:
  DType dtype_;
  std::int64_t hidden_;
  std::vector<float> values_;  ///< one row of f32 for each term, each group, and a sum that is still to be rounded
  std::vector<std::byte> wire_;
  std::vector<const std::byte*> rows_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_WIRE_ROWS_HPP
