#ifndef FERRY_PLAN_COUNT_COLUMNS_HPP
#define FERRY_PLAN_COUNT_COLUMNS_HPP

/// Layout of route's counts on a GPU, and the division of their sums among the threads of a block.

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Counts that are loaded and stored together: 16 bytes.
inline constexpr int kQuad = 4;

/// A row of counts: tokens for each rank, then distinct (token, expert) pairs for each expert. Both parts are padded to
/// whole quads.
struct CountColumns {
  int first_expert = 0;  ///< column of expert 0
  int size = 0;

  FERRY_HOST_DEVICE static constexpr CountColumns of(int num_ranks, int num_experts) {
    const int first_expert = (num_ranks + kQuad - 1) / kQuad * kQuad;
    return {first_expert, first_expert + (num_experts + kQuad - 1) / kQuad * kQuad};
  }
  FERRY_HOST_DEVICE constexpr int num_quads() const { return size / kQuad; }
};

/// Division of the sums over many rows of counts among threads: item `part * num_quads + quad` sums one quad of one
/// part of the rows. There are as many parts as the threads allow, so that few loads wait for each other.
struct SumShares {
  int num_quads = 0;
  int num_parts = 1;
  int rows_per_part = 0;

  FERRY_HOST_DEVICE static constexpr SumShares of(const CountColumns& columns, int num_rows, int num_threads) {
    SumShares shares;
    shares.num_quads = columns.num_quads();
    const int most_parts = num_threads / shares.num_quads < 1 ? 1 : num_threads / shares.num_quads;
    shares.rows_per_part = (num_rows + most_parts - 1) / most_parts;
    shares.num_parts = shares.rows_per_part == 0 ? 1 : (num_rows + shares.rows_per_part - 1) / shares.rows_per_part;
    return shares;
  }
  FERRY_HOST_DEVICE constexpr int num_items() const { return num_parts * num_quads; }
  FERRY_HOST_DEVICE constexpr int first_row(int part) const { return part * rows_per_part; }
  FERRY_HOST_DEVICE constexpr int end_row(int part, int num_rows) const {
    const int end = (part + 1) * rows_per_part;
    return end < num_rows ? end : num_rows;
  }
};

/// Whether `row` of a receiver gets no token, because it is beyond its group's rows. `row_offsets` [groups + 1] ascend
/// from 0; `group_rows` [groups] are the rows in use.
FERRY_HOST_DEVICE constexpr bool is_gap(const std::int32_t* row_offsets, const std::int32_t* group_rows, int num_groups,
                                        std::int32_t row) {
  // Finds the last group that begins at or before the row. It contains the row, since earlier groups that begin at the
  // same row are empty.
  int low = 0;
  int high = num_groups + 1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (row_offsets[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low == num_groups || row - row_offsets[low] >= group_rows[low];
}

}  // namespace ferry::plan

#endif  // FERRY_PLAN_COUNT_COLUMNS_HPP
