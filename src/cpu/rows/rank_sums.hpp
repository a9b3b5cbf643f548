#ifndef FERRY_CPU_ROWS_RANK_SUMS_HPP
#define FERRY_CPU_ROWS_RANK_SUMS_HPP

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {

/// One token's weighted sum in two steps (CombineOrder::kRankSums): the rows of each rank are summed and rounded, then
/// those sums. One object serves one token after another and keeps its memory.
class RankSums {
 public:
  explicit RankSums(RowSumFunction sum_row) : sum_row_(sum_row) {}

  /// The next token, of which `row_bytes` of each row are summed.
  void begin(std::size_t row_bytes) {
    rank_ = -1;
    rows_.clear();
    weights_.clear();
    num_sums_ = 0;
    row_bytes_ = row_bytes;
  }
  /// The next row; ranks ascend.
  void add(int rank, const std::byte* row, float weight) {
    if (rank != rank_) close_rank();
    rank_ = rank;
    rows_.push_back(row);
    weights_.push_back(weight);
  }
  /// Writes the token's sum to `out`.
  void finish(std::byte* out) {
    close_rank();
    for (std::size_t i = 0; i < num_sums_; ++i) rows_.push_back(sums_.data() + i * row_bytes_);
    sum_row_({rows_.data(), nullptr, rows_.size(), out, row_bytes_});
  }

 private:
  void close_rank() {
    if (rows_.empty()) return;
    sums_.resize(std::max(sums_.size(), (num_sums_ + 1) * row_bytes_));
    sum_row_({rows_.data(), weights_.data(), rows_.size(), sums_.data() + num_sums_ * row_bytes_, row_bytes_});
    ++num_sums_;
    rows_.clear();
    weights_.clear();
  }

  RowSumFunction sum_row_;
  std::size_t row_bytes_ = 0;
  int rank_ = -1;
  std::vector<const std::byte*> rows_;  // of rank_
  std::vector<float> weights_;
  std::vector<std::byte> sums_;  // [num_sums_, row_bytes_] of the ranks before it
  std::size_t num_sums_ = 0;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_RANK_SUMS_HPP
