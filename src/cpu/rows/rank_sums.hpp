#ifndef FERRY_CPU_ROWS_RANK_SUMS_HPP
#define FERRY_CPU_ROWS_RANK_SUMS_HPP

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/rows/row_sum.hpp"

namespace ferry::cpu {

/// One token's weighted sum in two steps (CombineOrder::kRankSums): the rows of each rank are summed and rounded, then
/// those sums, a piece of all rows after another. One object serves one token after another and keeps its memory.
class RankSums {
 public:
  explicit RankSums(RowSumFunction sum_row) : sum_row_(sum_row) {}

  /// The next token, of which `row_bytes` of each row are summed.
  void begin(std::size_t row_bytes) {
    rank_ = -1;
    rows_.clear();
    weights_.clear();
    first_rows_.clear();
    row_bytes_ = row_bytes;
  }
  /// The next row; ranks ascend.
  void add(int rank, const std::byte* row, float weight) {
    if (rank != rank_) first_rows_.push_back(rows_.size());
    rank_ = rank;
    rows_.push_back(row);
    weights_.push_back(weight);
  }
  /// Writes the token's sum to `out`.
  void finish(std::byte* out) {
    first_rows_.push_back(rows_.size());
    const std::size_t num_ranks = first_rows_.size() - 1;
    sums_.resize(std::max(sums_.size(), num_ranks * kPieceBytes));
    sum_rows_.clear();
    for (std::size_t i = 0; i < num_ranks; ++i) sum_rows_.push_back(sums_.data() + i * kPieceBytes);
    for (std::size_t offset = 0; offset < row_bytes_; offset += kPieceBytes) {
      const std::size_t piece_bytes = std::min(kPieceBytes, row_bytes_ - offset);
      for (std::size_t i = 0; i < num_ranks; ++i) {
        const std::size_t first = first_rows_[i];
        sum_row_({rows_.data() + first, weights_.data() + first, first_rows_[i + 1] - first,
                  sums_.data() + i * kPieceBytes, piece_bytes});
      }
      sum_row_({sum_rows_.data(), nullptr, num_ranks, out + offset, piece_bytes});
      for (const std::byte*& row : rows_) row += piece_bytes;
    }
  }

 private:
  /// Of a row, at a time: the sums of up to 32 ranks then fit the first-level cache, and all of a token's rows are read
  /// side by side. Measured with rows of 14 KiB: from 256 to 512 bytes take two thirds of the time of whole rows.
  static constexpr std::size_t kPieceBytes = 512;

  RowSumFunction sum_row_;
  std::size_t row_bytes_ = 0;
  int rank_ = -1;
  std::vector<const std::byte*> rows_;
  std::vector<float> weights_;
  std::vector<std::size_t> first_rows_;     // of each rank that has any, and the end
  std::vector<std::byte> sums_;             // one piece by rank
  std::vector<const std::byte*> sum_rows_;  // those pieces
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROWS_RANK_SUMS_HPP
