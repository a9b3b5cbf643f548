#ifndef FERRY_CPU_ROWS_RANK_SUMS_HPP
#define FERRY_CPU_ROWS_RANK_SUMS_HPP

#include <cstddef>
#include <vector>

#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {

/// Weighted sum of a token in two steps (CombineOrder::kRankSums): the rows of each rank are summed and rounded, then
/// these sums. One object serves one token after another and keeps its memory.
class RankSums {
 public:
  explicit RankSums(RowSumFunction sum_row) : sum_row_(sum_row) {}

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
    sum_row_({rows_.data(), weights_.data(), rows_.size(), out, row_bytes_, ends_.empty() ? &kNoEnd : ends_.data(),
              ends_.size()});
  }

 private:
  RowSumFunction sum_row_;
  std::size_t row_bytes_ = 0;
  int rank_ = -1;
  std::vector<const std::byte*> rows_;
  std::vector<float> weights_;
  std::vector<std::size_t> ends_;  ///< end of the rows of each rank that has any
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_RANK_SUMS_HPP
