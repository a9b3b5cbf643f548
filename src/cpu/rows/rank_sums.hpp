#ifndef FERRY_CPU_ROWS_RANK_SUMS_HPP
#define FERRY_CPU_ROWS_RANK_SUMS_HPP

#include <cstddef>
#include <vector>

#include "core/backend.hpp"
#include "cpu/rows/row_sum.hpp"
#include "cpu/rows/wire_rows.hpp"

namespace ferry::cpu {

/// Weighted sum of a token in two steps (CombineOrder::kRankSums): the rows of each rank are summed and rounded, or
/// quantised, as they travel; then these sums. One object serves one token after another and keeps its memory.
class RankSums {
 public:
  explicit RankSums(const CombineCall& call)
      : sum_row_(choose_row_sum(call.x.dtype)), quantizes_(call.wire_format == WireFormat::kFp8), wire_sum_(call) {}

  /// Begins the next token; `row_bytes` of each row are summed.
  void begin(std::size_t row_bytes) {
    rank_ = -1;
    rows_.clear();
    weights_.clear();
    ends_.clear();
    row_bytes_ = row_bytes;
  }
  /// Adds the next row; ranks must ascend.
  void add(int rank, const std::byte* row, float weight) {
    if (rank != rank_) ends_.push_back(rows_.size());
    rank_ = rank;
    rows_.push_back(row);
    weights_.push_back(weight);
    ends_.back() = rows_.size();
  }
  /// Writes the token's sum to `out`.
  void finish(std::byte* out) {
    // For a token without rows, which has no groups; the value is not read then.
    static constexpr std::size_t kNoEnd = 0;
    const RowSum terms{.rows = rows_.data(),
                       .weights = weights_.data(),
                       .num_rows = rows_.size(),
                       .out = out,
                       .row_bytes = row_bytes_,
                       .group_ends = ends_.empty() ? &kNoEnd : ends_.data(),
                       .num_groups = ends_.size()};
    if (quantizes_) {
      wire_sum_.sum_groups(terms);
    } else {
      sum_row_(terms);
    }
  }

 private:
  RowSumFunction sum_row_;
  bool quantizes_;
  WireSum wire_sum_;
  std::size_t row_bytes_ = 0;
  int rank_ = -1;
  std::vector<const std::byte*> rows_;
  std::vector<float> weights_;
  std::vector<std::size_t> ends_;  ///< end of the rows of each rank that has any
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_RANK_SUMS_HPP
