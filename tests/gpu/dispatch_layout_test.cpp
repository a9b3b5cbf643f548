/// Tests of the dispatch_layout kernel, on the host's cases in tests/unit/dispatch_layout_test.cpp.

#include "ferry/dispatch_layout.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "gpu/on_device.hpp"
#include "support/gpu_ranks.hpp"
#include "support/layout_case.hpp"

namespace ferry::test {
namespace {

LayoutCounts count(RankContext& context, const LayoutCase& one, bool wide) {
  LayoutCounts counts = one.expected();
  for (auto* part : {&counts.per_rank, &counts.per_node, &counts.per_expert}) part->assign(part->size(), -7);
  counts.in_rank.assign(counts.in_rank.size(), 7);
  const OnDevice<std::int64_t> wide_ids(one.ids);
  const OnDevice<std::int32_t> short_ids({one.ids.begin(), one.ids.end()});
  const OnDevice<std::int32_t> owners(one.owners);
  const OnDevice<std::int32_t> per_rank(counts.per_rank);
  const OnDevice<std::int32_t> per_node(counts.per_node);
  const OnDevice<std::int32_t> per_expert(counts.per_expert);
  const OnDevice<std::uint8_t> in_rank(counts.in_rank);
  DispatchLayoutOptions options{.num_experts = one.num_experts,
                                .num_ranks = one.num_ranks,
                                .ranks_per_node = one.ranks_per_node,
                                .backend = "cuda"};
  if (!one.owners.empty()) options.expert_to_rank = ConstTensorView(owners.data(), DType::kInt32, {one.num_experts});
  const DispatchLayout out{TensorView(per_rank.data(), DType::kInt32, {one.num_ranks}),
                           TensorView(per_node.data(), DType::kInt32, {one.num_nodes()}),
                           TensorView(per_expert.data(), DType::kInt32, {one.num_experts}),
                           TensorView(in_rank.data(), DType::kUint8, {one.num_tokens, one.num_ranks})};
  const ConstTensorView topk_idx =
      wide ? ConstTensorView(wide_ids.data(), DType::kInt64, {one.num_tokens, one.num_topk})
           : ConstTensorView(short_ids.data(), DType::kInt32, {one.num_tokens, one.num_topk});
  const Status status = dispatch_layout(topk_idx, options, out, thread_stream());
  context.expect_ok(status, one.name());
  per_rank.read(counts.per_rank);
  per_node.read(counts.per_node);
  per_expert.read(counts.per_expert);
  in_rank.read(counts.in_rank);
  return counts;
}

TEST(DispatchLayoutOnGpu, CountsRandomIds) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(5);
    for (int i = 0; i < 200; ++i) {
      const LayoutCase one = draw_layout_case(random, i % 20 == 0 ? 20000 : 400, 128);
      context.expect(count(context, one, true) == one.expected(), one.name() + " i64");
      context.expect(count(context, one, false) == one.expected(), one.name() + " i32");
    }
  });
}

TEST(DispatchLayoutOnGpu, RefusesHostMemory) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    const std::vector<std::int64_t> ids{0, 1};
    std::vector<std::int32_t> counts{-7, -7};
    const OnDevice<std::int64_t> ids_on_gpu(ids);
    const DispatchLayoutOptions options{.num_experts = 2, .num_ranks = 2, .backend = "cuda"};
    const DispatchLayout out{.num_tokens_per_rank = TensorView(counts.data(), DType::kInt32, {2})};
    const ConstTensorView on_host(ids.data(), DType::kInt64, {2, 1});
    const ConstTensorView on_gpu(ids_on_gpu.data(), DType::kInt64, {2, 1});
    context.expect_code(dispatch_layout(on_host, options, {}, thread_stream()), ErrorCode::kInvalidArgument, "ids");
    context.expect_code(dispatch_layout(on_gpu, options, out, thread_stream()), ErrorCode::kInvalidArgument, "counts");
    context.expect(counts.front() == -7, "the counts are untouched");
  });
}

TEST(DispatchLayoutOnGpu, RefusesMoreRanksThanItCounts) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    const ConstTensorView none(nullptr, DType::kInt64, {0, 1});
    const Status status = dispatch_layout(none, {.num_experts = 1, .num_ranks = 129, .backend = "cuda"}, {});
    context.expect_code(status, ErrorCode::kUnsupported, "129 ranks");
  });
}

}  // namespace
}  // namespace ferry::test
