/// Tests of the arrival_tables kernel, on the host's cases in tests/unit/arrival_tables_test.cpp.

#include "ferry/arrival_tables.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "gpu/on_device.hpp"
#include "support/arrival_case.hpp"
#include "support/gpu_ranks.hpp"

namespace ferry::test {
namespace {

ArrivalResults make(RankContext& context, const ArrivalCase& one, bool wide) {
  ArrivalResults made = one.spoiled();
  const OnDevice<std::int32_t> source(one.source);
  const OnDevice<std::int64_t> wide_ids(one.ids);
  const OnDevice<std::int32_t> short_ids({one.ids.begin(), one.ids.end()});
  const OnDevice<std::int32_t> rows_of_expert(one.rows_of_expert);
  const OnDevice<std::int64_t> sent(one.sent);
  const OnDevice<std::int32_t> origin(made.origin);
  const OnDevice<std::int32_t> through(made.rows_through_rank);
  const OnDevice<std::int32_t> ends(made.expert_ends);
  const OnDevice<std::int64_t> copy(made.sent_idx);
  const Arrivals in{.source = ConstTensorView(source.data(), DType::kInt32, {one.num_rows, 2}),
                    .topk_idx = wide ? ConstTensorView(wide_ids.data(), DType::kInt64, {one.num_rows, one.num_topk})
                                     : ConstTensorView(short_ids.data(), DType::kInt32, {one.num_rows, one.num_topk}),
                    .rows_per_expert = ConstTensorView(rows_of_expert.data(), DType::kInt32, {one.num_local()}),
                    .sent_idx = ConstTensorView(sent.data(), DType::kInt64, {one.num_tokens, one.num_topk})};
  const ArrivalTables out{.origin = TensorView(origin.data(), DType::kInt32, {one.num_rows, 2 + one.num_topk}),
                          .rows_through_rank = TensorView(through.data(), DType::kInt32, {one.num_ranks}),
                          .expert_ends = TensorView(ends.data(), DType::kInt32, {one.num_local()}),
                          .sent_idx = TensorView(copy.data(), DType::kInt64, {one.num_tokens, one.num_topk})};
  const ArrivalTablesOptions options{
      .num_ranks = one.num_ranks, .max_tokens = one.max_tokens, .expert_alignment = one.alignment, .backend = "cuda"};
  context.expect_ok(arrival_tables(in, options, out, thread_stream()), one.name());
  origin.read(made.origin);
  through.read(made.rows_through_rank);
  ends.read(made.expert_ends);
  copy.read(made.sent_idx);
  return made;
}

TEST(ArrivalTablesOnGpu, DescribesRandomRows) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(7);
    for (int i = 0; i < 100; ++i) {
      const ArrivalCase one = draw_arrival_case(random, i % 20 == 0 ? 40000 : 600, 128);
      context.expect(make(context, one, true) == one.expected(), one.name() + " i64");
      context.expect(make(context, one, false) == one.expected(), one.name() + " i32");
    }
  });
}

TEST(ArrivalTablesOnGpu, RefusesHostMemory) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    const std::vector<std::int32_t> source{0, 0};
    const std::vector<std::int64_t> ids{0};
    std::vector<std::int32_t> through{-7};
    const OnDevice<std::int32_t> source_on_gpu(source);
    const OnDevice<std::int64_t> ids_on_gpu(ids);
    const ConstTensorView idx(ids_on_gpu.data(), DType::kInt64, {1, 1});
    const ArrivalTablesOptions options{.backend = "cuda"};
    context.expect_code(arrival_tables({ConstTensorView(source.data(), DType::kInt32, {1, 2}), idx}, options, {}),
                        ErrorCode::kInvalidArgument, "source");
    const ArrivalTables out{.rows_through_rank = TensorView(through.data(), DType::kInt32, {1})};
    context.expect_code(
        arrival_tables({ConstTensorView(source_on_gpu.data(), DType::kInt32, {1, 2}), idx}, options, out),
        ErrorCode::kInvalidArgument, "output");
    context.expect(through.front() == -7, "the output is untouched");
  });
}

}  // namespace
}  // namespace ferry::test
