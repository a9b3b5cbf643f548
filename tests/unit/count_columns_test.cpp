/// Layout of counts on a GPU, shares of the sums over them, and detection of rows without a token.

#include "plan/count_columns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <vector>

namespace ferry::plan {
namespace {

TEST(CountColumns, BothPartsAreWholeQuads) {
  for (const int num_ranks : {1, 3, 4, 8, 127, 128}) {
    for (const int num_experts : {0, 1, 255, 256, 4096}) {
      const auto columns = CountColumns::of(num_ranks, num_experts);
      EXPECT_EQ(columns.first_expert % kQuad, 0);
      EXPECT_EQ(columns.size, columns.num_quads() * kQuad);
      EXPECT_GE(columns.first_expert, num_ranks);
      EXPECT_GE(columns.size - columns.first_expert, num_experts);
      EXPECT_LT(columns.size, num_ranks + num_experts + 2 * kQuad);
    }
  }
}

TEST(SumShares, TakeEveryRowOfEveryQuadOnce) {
  constexpr int kThreads = 1024;
  for (const int num_rows : {1, 2, 15, 16, 63, 64, 65, 128}) {
    for (const int num_experts : {1, 60, 256, 4095, 4096}) {
      const auto columns = CountColumns::of(8, num_experts);
      const auto shares = SumShares::of(columns, num_rows, kThreads);
      SCOPED_TRACE(testing::Message() << num_rows << " rows, " << num_experts << " experts");
      EXPECT_LE(shares.num_items(), std::max(kThreads, columns.num_quads()));
      int next = 0;
      for (int part = 0; part < shares.num_parts; ++part) {
        EXPECT_EQ(shares.first_row(part), next);
        EXPECT_GT(shares.end_row(part, num_rows), next) << "no part is empty";
        next = shares.end_row(part, num_rows);
      }
      EXPECT_EQ(next, num_rows);
    }
  }
}

TEST(Gaps, AreTheRowsBeyondTheirGroups) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int num_groups = static_cast<int>(random() % 9);
    std::vector<std::int32_t> offsets{0};
    std::vector<std::int32_t> rows;
    std::vector<bool> gaps;
    for (int group = 0; group < num_groups; ++group) {
      rows.push_back(static_cast<std::int32_t>(random() % 5));
      const auto spare = static_cast<std::int32_t>(random() % 3);
      gaps.insert(gaps.end(), static_cast<std::size_t>(rows.back()), false);
      gaps.insert(gaps.end(), static_cast<std::size_t>(spare), true);
      offsets.push_back(static_cast<std::int32_t>(gaps.size()));
    }
    for (std::size_t row = 0; row < gaps.size(); ++row) {
      EXPECT_EQ(is_gap(offsets.data(), rows.data(), num_groups, static_cast<std::int32_t>(row)), gaps[row]);
    }
    EXPECT_TRUE(is_gap(offsets.data(), rows.data(), num_groups, offsets.back()));
  }
}

}  // namespace
}  // namespace ferry::plan
