/// dispatch_layout on host memory; tests/gpu/dispatch_layout_test.cpp runs the kernel on the same cases.

#include "ferry/dispatch_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/layout_case.hpp"

namespace ferry {
namespace {

using test::LayoutCase;
using test::LayoutCounts;
using testing::HasSubstr;

template <typename Id>
LayoutCounts count(const LayoutCase& one, DType dtype) {
  const std::vector<Id> ids(one.ids.begin(), one.ids.end());
  LayoutCounts counts = one.expected();  // for the sizes
  counts.per_rank.assign(counts.per_rank.size(), -7);
  counts.per_node.assign(counts.per_node.size(), -7);
  counts.per_expert.assign(counts.per_expert.size(), -7);
  counts.in_rank.assign(counts.in_rank.size(), 7);
  DispatchLayoutOptions options{
      .num_experts = one.num_experts, .num_ranks = one.num_ranks, .ranks_per_node = one.ranks_per_node};
  if (!one.owners.empty()) {
    options.expert_to_rank = ConstTensorView(one.owners.data(), DType::kInt32, {one.num_experts});
  }
  const DispatchLayout out{TensorView(counts.per_rank.data(), DType::kInt32, {one.num_ranks}),
                           TensorView(counts.per_node.data(), DType::kInt32, {one.num_nodes()}),
                           TensorView(counts.per_expert.data(), DType::kInt32, {one.num_experts}),
                           TensorView(counts.in_rank.data(), DType::kUint8, {one.num_tokens, one.num_ranks})};
  const Status status =
      dispatch_layout(ConstTensorView(ids.data(), dtype, {one.num_tokens, one.num_topk}), options, out);
  EXPECT_TRUE(status.ok()) << status.message();
  return counts;
}

TEST(DispatchLayout, CountsRandomIds) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 300; ++i) {
    const LayoutCase one = test::draw_layout_case(random, 40, 80);
    EXPECT_EQ(count<std::int64_t>(one, DType::kInt64), one.expected()) << one.name();
    EXPECT_EQ(count<std::int32_t>(one, DType::kInt32), one.expected()) << one.name();
  }
}

/// Ids of four tokens, and memory for the counts.
struct Small {
  std::vector<std::int64_t> ids{0, 5, 5, 5, -1, 2, 7, 0};
  std::vector<std::int32_t> per_rank{-1, -1};
  std::vector<std::int32_t> owners{0, 0, 0, 0, 0, 0, 0, 9};
  DispatchLayoutOptions options{.num_experts = 8, .num_ranks = 2};
  ConstTensorView topk_idx{ids.data(), DType::kInt64, {4, 2}};
  DispatchLayout out{.num_tokens_per_rank = TensorView(per_rank.data(), DType::kInt32, {2})};

  Status count(Stream stream = {}) { return dispatch_layout(topk_idx, options, out, stream); }
};

TEST(DispatchLayout, LeavesOutWhatIsNotWanted) {
  Small small;
  ASSERT_TRUE(small.count().ok());
  EXPECT_THAT(small.per_rank, testing::ElementsAre(3, 3));
}

TEST(DispatchLayout, ExpertsOfNoRankCountForNone) {
  Small small;
  small.options.expert_to_rank = ConstTensorView(small.owners.data(), DType::kInt32, {8});
  ASSERT_TRUE(small.count().ok());
  EXPECT_THAT(small.per_rank, testing::ElementsAre(4, 0));
}

TEST(DispatchLayout, RefusesWrongArgumentsAndWritesNothing) {
  const auto refused = [](auto spoil, const std::string& word) {
    Small small;
    spoil(small);
    const Status status = small.count();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.message();
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
    EXPECT_THAT(small.per_rank, testing::ElementsAre(-1, -1));
  };
  refused([](Small& small) { small.options.num_experts = 0; }, "num_experts is 0");
  refused([](Small& small) { small.options.num_ranks = 40000; }, "num_ranks is 40000");
  refused([](Small& small) { small.options.ranks_per_node = -1; }, "ranks_per_node is -1");
  refused([](Small& small) { small.options.backend = "tpu"; }, "backend is \"tpu\"");
  refused([](Small& small) { small.topk_idx = ConstTensorView(small.ids.data(), DType::kInt64, {8}); }, "[T, K]");
  refused([](Small& small) { small.topk_idx = ConstTensorView(small.ids.data(), DType::kFloat32, {4, 2}); }, "f32");
  refused([](Small& small) { small.topk_idx = ConstTensorView(nullptr, DType::kInt64, {4, 2}); }, "null");
  refused([](Small& small) { small.topk_idx = ConstTensorView(small.ids.data(), DType::kInt64, {0, 33}); }, "K from 1");
  refused([](Small& small) { small.out.num_tokens_per_rank = TensorView(small.per_rank.data(), DType::kInt32, {3}); },
          "num_tokens_per_rank is [3]");
  refused(
      [](Small& small) {
        small.out.is_token_in_rank = TensorView(small.per_rank.data(), DType::kInt32, {4, 2});
      },
      "is_token_in_rank has dtype i32");
  refused([](Small& small) { small.options.expert_to_rank = ConstTensorView(small.owners.data(), DType::kInt32, {7}); },
          "expert_to_rank is [7]");
  Small small;
  EXPECT_EQ(small.count(Stream{&small}).code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry
