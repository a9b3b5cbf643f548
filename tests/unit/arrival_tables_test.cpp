/// arrival_tables on host memory; tests/gpu/arrival_tables_test.cpp and the emulator run the kernel on the same cases.

#include "ferry/arrival_tables.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/arrival_case.hpp"

namespace ferry {
namespace {

using test::ArrivalCase;
using test::ArrivalResults;
using testing::HasSubstr;

template <typename Id>
ArrivalResults make(const ArrivalCase& one, DType dtype) {
  const std::vector<Id> ids(one.ids.begin(), one.ids.end());
  ArrivalResults made = one.spoiled();
  const Arrivals in{.source = ConstTensorView(one.source.data(), DType::kInt32, {one.num_rows, 2}),
                    .topk_idx = ConstTensorView(ids.data(), dtype, {one.num_rows, one.num_topk}),
                    .rows_per_expert = ConstTensorView(one.rows_of_expert.data(), DType::kInt32, {one.num_local()}),
                    .sent_idx = ConstTensorView(one.sent.data(), DType::kInt64, {one.num_tokens, one.num_topk})};
  const ArrivalTables out{
      .origin = TensorView(made.origin.data(), DType::kInt32, {one.num_rows, 2 + one.num_topk}),
      .rows_through_rank = TensorView(made.rows_through_rank.data(), DType::kInt32, {one.num_ranks}),
      .expert_ends = TensorView(made.expert_ends.data(), DType::kInt32, {one.num_local()}),
      .sent_idx = TensorView(made.sent_idx.data(), DType::kInt64, {one.num_tokens, one.num_topk})};
  const ArrivalTablesOptions options{
      .num_ranks = one.num_ranks, .max_tokens = one.max_tokens, .expert_alignment = one.alignment};
  const Status status = arrival_tables(in, options, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return made;
}

TEST(ArrivalTables, DescribesRandomRows) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 300; ++i) {
    const ArrivalCase one = test::draw_arrival_case(random, 60, 40);
    EXPECT_EQ(make<std::int64_t>(one, DType::kInt64), one.expected()) << one.name();
    EXPECT_EQ(make<std::int32_t>(one, DType::kInt32), one.expected()) << one.name();
  }
}

/// Three rows of two ranks, the last without a token.
struct Small {
  std::vector<std::int32_t> source{0, 3, 1, 2, -1, -1};
  std::vector<std::int64_t> ids{0, -1, 1, 0, 9, 9};
  std::vector<std::int32_t> rows_of_expert{1, 2};
  std::vector<std::int32_t> origin = std::vector<std::int32_t>(12, -7);
  std::vector<std::int32_t> through{-7, -7};
  std::vector<std::int32_t> ends{-7, -7};
  std::vector<std::int64_t> copy = std::vector<std::int64_t>(6, -7);
  Arrivals in{.source = ConstTensorView(source.data(), DType::kInt32, {3, 2}),
              .topk_idx = ConstTensorView(ids.data(), DType::kInt64, {3, 2})};
  ArrivalTablesOptions options{.num_ranks = 2, .max_tokens = 10, .expert_alignment = 4};
  ArrivalTables out{.origin = TensorView(origin.data(), DType::kInt32, {3, 4})};

  Status make(Stream stream = {}) const { return arrival_tables(in, options, out, stream); }
};

TEST(ArrivalTables, LeavesOutWhatIsNotWanted) {
  Small small;
  ASSERT_TRUE(small.make().ok());
  EXPECT_THAT(small.origin, testing::ElementsAre(3, 0, -1, -1, 12, 3, -1, -1, -1, -1, -1, -1));
  EXPECT_THAT(small.through, testing::Each(-7));
}

TEST(ArrivalTables, WhatAFailedDispatchLeavesWritesNowhereElse) {
  Small small;
  std::vector<std::int32_t> guarded{-7, -7, -7, -7};
  small.out.rows_through_rank = TensorView(guarded.data() + 1, DType::kInt32, {2});
  small.source = {77, 1, -5, 2, 1, 2147483647};
  ASSERT_TRUE(small.make().ok());
  EXPECT_THAT(small.origin, testing::Each(-1));
  EXPECT_EQ(guarded.front(), -7);
  EXPECT_EQ(guarded.back(), -7);
}

TEST(ArrivalTables, RefusesWrongArgumentsAndWritesNothing) {
  const auto refused = [](auto spoil, const std::string& word) {
    Small small;
    spoil(small);
    const Status status = small.make();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.message();
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
    EXPECT_THAT(small.origin, testing::Each(-7));
  };
  refused([](Small& small) { small.options.num_ranks = 0; }, "num_ranks is 0");
  refused([](Small& small) { small.options.max_tokens = std::int64_t{1} << 31; }, "max_tokens is 2147483648");
  refused([](Small& small) { small.options.expert_alignment = 0; }, "expert_alignment is 0");
  refused([](Small& small) { small.options.backend = "tpu"; }, "backend is \"tpu\"");
  refused([](Small& small) { small.in.topk_idx = ConstTensorView(small.ids.data(), DType::kInt64, {6}); }, "[N, K]");
  refused([](Small& small) { small.in.topk_idx = ConstTensorView(small.ids.data(), DType::kFloat32, {3, 2}); }, "f32");
  refused(
      [](Small& small) {
        small.in.source = ConstTensorView(small.source.data(), DType::kInt32, {2, 2});
      },
      "source is [2, 2]");
  refused([](Small& small) { small.in.source = ConstTensorView(nullptr, DType::kInt32, {3, 2}); }, "null");
  refused(
      [](Small& small) {
        small.out.origin = TensorView(small.origin.data(), DType::kInt32, {3, 3});
      },
      "origin is [3, 3]");
  refused([](Small& small) { small.out.rows_through_rank = TensorView(small.through.data(), DType::kInt32, {3}); },
          "rows_through_rank is [3]");
  refused([](Small& small) { small.out.expert_ends = TensorView(small.ends.data(), DType::kInt32, {2}); },
          "rows_per_expert");
  refused(
      [](Small& small) {
        small.in.rows_per_expert = ConstTensorView(small.rows_of_expert.data(), DType::kInt32, {2});
        small.out.expert_ends = TensorView(small.ends.data(), DType::kInt32, {1});
      },
      "expert_ends is [1]");
  refused(
      [](Small& small) {
        small.in.rows_per_expert = ConstTensorView(small.rows_of_expert.data(), DType::kInt32, {2});
        small.out.expert_ends = TensorView(small.ends.data(), DType::kInt32, {2});
        small.options.expert_alignment = std::int64_t{1} << 30;
      },
      "expert_alignment is 1073741824, expected 1 to 1073741823 for 2 experts");
  refused(
      [](Small& small) {
        small.in.sent_idx = ConstTensorView(small.ids.data(), DType::kInt64, {3, 2});
        small.out.sent_idx = TensorView(small.copy.data(), DType::kInt32, {3, 2});
      },
      "sent_idx has dtype i32");
  Small small;
  EXPECT_EQ(small.make(Stream{&small}).code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry
