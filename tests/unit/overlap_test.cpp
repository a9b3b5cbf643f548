/// Overlap of a call's tensors, compared with marking every byte.

#include "core/overlap.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace ferry {
namespace {

/// Only addresses are compared; no memory is there.
void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)

ConstTensorView view_of(std::uintptr_t address, DType dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides) {
  return {at(address), dtype, shape, strides};
}

/// [rows, 8] u8 with a stride in bytes.
Footprint rows_at(std::uintptr_t address, std::int64_t rows, std::int64_t stride, std::int64_t width = 8) {
  return {"x", view_of(address, DType::kUint8, {rows, width}, {stride, 1})};
}

TEST(Overlap, OfRows) {
  const Footprint rows = rows_at(1000, 4, 32);  // 1000 to 1008, 1032 to 1040, 1064 to 1072, 1096 to 1104
  EXPECT_TRUE(rows.overlaps(rows));
  EXPECT_TRUE(rows.same_as(rows));
  EXPECT_EQ(rows.begin(), 1000U);
  EXPECT_EQ(rows.end(), 1104U);
  EXPECT_FALSE(rows.overlaps(rows_at(1008, 4, 32))) << "next to each row";
  EXPECT_FALSE(rows.overlaps(rows_at(1024, 4, 32))) << "before each row";
  EXPECT_TRUE(rows.overlaps(rows_at(1025, 4, 32)));
  EXPECT_TRUE(rows.overlaps(rows_at(1007, 4, 32)));
  EXPECT_FALSE(rows.overlaps(rows_at(1104, 4, 32))) << "behind";
  EXPECT_TRUE(rows.overlaps(rows_at(1103, 1, 0)));
  EXPECT_FALSE(rows.overlaps(rows_at(896, 4, 32))) << "its last row ends at 1000";
}

TEST(Overlap, OfRowsWithoutGaps) {
  Rows rows;
  rows.data = static_cast<std::byte*>(at(1000));
  rows.num_rows = 4;
  rows.row_bytes = rows.stride_bytes = 16;
  const Footprint whole("x", rows);
  EXPECT_EQ(whole.begin(), 1000U);
  EXPECT_EQ(whole.end(), 1064U);
  EXPECT_TRUE(whole.same_as({"x", view_of(1000, DType::kFloat32, {4, 4}, {4, 1})}));
  EXPECT_TRUE(whole.same_as({"x", view_of(1000, DType::kFloat32, {16, 1}, {1, 7})})) << "the same bytes";
  EXPECT_FALSE(whole.same_as(rows_at(1000, 4, 16)));
  EXPECT_TRUE(whole.overlaps(rows_at(1008, 4, 32)));
  EXPECT_FALSE(whole.overlaps(rows_at(1064, 4, 32)));
  EXPECT_FALSE(whole.overlaps(rows_at(936, 3, 28))) << "its last row ends at 1000";
  rows.data = static_cast<std::byte*>(at(std::numeric_limits<std::uintptr_t>::max() - 31));
  EXPECT_EQ(Footprint("x", rows).end(), std::numeric_limits<std::uintptr_t>::max()) << "more than there are addresses";
  rows.num_rows = 0;
  EXPECT_FALSE(Footprint("x", rows).overlaps(whole));
}

TEST(Overlap, OfNothing) {
  EXPECT_FALSE(Footprint().overlaps(rows_at(0, 4, 8)));
  EXPECT_FALSE(rows_at(1000, 0, 8).overlaps(rows_at(1000, 4, 8)));
  EXPECT_FALSE(Footprint("x", ConstTensorView()).overlaps(rows_at(0, 100, 8)));
}

TEST(Overlap, OfAbsurdStridesEnds) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  const Footprint absurd("x", view_of(64, DType::kInt64, {std::int64_t{1} << 31, 4}, {kMost, 1}));
  EXPECT_EQ(absurd.end(), std::numeric_limits<std::uintptr_t>::max());
  EXPECT_TRUE(absurd.overlaps(rows_at(64, 1, 0)));
  EXPECT_FALSE(absurd.overlaps(rows_at(128, 1 << 20, 64)));
}

TEST(Overlap, IsExact) {
  constexpr std::uintptr_t kBase = 4096;
  std::mt19937 random(1);
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::array<int, 2> num_of_each{};
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::vector<int>> marks(2, std::vector<int>(1024, 0));
    std::vector<Footprint> footprints;
    for (auto& mark : marks) {
      const DType dtype = pick(0, 1) == 0 ? DType::kUint8 : DType::kInt32;
      const auto bytes = static_cast<std::int64_t>(size_bytes(dtype));
      const std::int64_t rows = pick(0, 6);
      const std::int64_t columns = pick(1, 6);
      std::int64_t row_stride = pick(0, 24);
      std::int64_t column_stride = pick(0, 3);
      if (pick(0, 1) == 0) std::swap(row_stride, column_stride);
      const std::int64_t offset = pick(0, 300);
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
          const std::int64_t first = offset + (row * row_stride + column * column_stride) * bytes;
          for (std::int64_t byte = 0; byte < bytes; ++byte) mark[static_cast<std::size_t>(first + byte)] = 1;
        }
      }
      footprints.emplace_back("x", view_of(kBase + static_cast<std::uintptr_t>(offset), dtype, {rows, columns},
                                           {row_stride, column_stride}));
    }
    bool shared = false;
    for (std::size_t i = 0; i < marks[0].size(); ++i) shared = shared || (marks[0][i] != 0 && marks[1][i] != 0);
    ++num_of_each[shared ? 1 : 0];
    ASSERT_EQ(footprints[0].overlaps(footprints[1]), shared) << "round " << round;
    ASSERT_EQ(footprints[1].overlaps(footprints[0]), shared) << "round " << round;
  }
  EXPECT_GT(num_of_each[0], 1000);
  EXPECT_GT(num_of_each[1], 1000);
}

TEST(Overlap, RefusalNamesBothTensors) {
  const std::array outputs{Footprint("output x", view_of(1000, DType::kUint8, {4, 8}, {8, 1})),
                           Footprint("output weights", view_of(2000, DType::kUint8, {4, 8}, {8, 1}))};
  const std::array inputs{Footprint("input x", view_of(1024, DType::kUint8, {4, 8}, {8, 1}))};
  const Status status = check_overlap("combine", outputs, inputs);
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(
      status.message(),
      "combine: output x (addresses 0x3e8 to 0x408) shares memory with input x (0x400 to 0x420); give each memory "
      "of its own");
}

TEST(Overlap, OnlyTheFirstOutputMayReplaceAnInputExactly) {
  const Footprint bias = rows_at(1000, 4, 32);
  const std::array biases{bias};
  EXPECT_TRUE(check_overlap("combine", std::array{rows_at(1000, 4, 32)}, {}, biases).ok());
  EXPECT_FALSE(check_overlap("combine", std::array{rows_at(1000, 4, 64)}, {}, biases).ok()) << "another stride";
  EXPECT_FALSE(check_overlap("combine", std::array{rows_at(1032, 4, 32)}, {}, biases).ok()) << "a row further";
  EXPECT_FALSE(check_overlap("combine", std::array{rows_at(9000, 4, 32), bias}, {}, biases).ok());
}

}  // namespace
}  // namespace ferry
