/// Tests of the kernels of expand_rows and reduce_rows, and of the tables that they use, on the host's cases in
/// tests/unit/expansion_test.cpp.

#include "ferry/expansion.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "ferry/arrival_tables.hpp"
#include "gpu/on_device.hpp"
#include "support/expansion_case.hpp"
#include "support/gpu_ranks.hpp"

namespace ferry::test {
namespace {

constexpr ExpansionOptions kOnGpu{.zero_padding = true, .backend = "cuda"};

ExpansionTables make_tables(RankContext& context, const ExpansionCase& one) {
  const ArrivalCase& arrivals = one.arrivals;
  const std::int64_t num_rows = arrivals.num_rows;
  const std::int64_t num_local = arrivals.num_local();
  ExpansionTables made = one.tables();
  made.spoil();
  const OnDevice<std::int32_t> source(arrivals.source);
  const OnDevice<std::int64_t> ids(arrivals.ids);
  const OnDevice<std::int32_t> rows_per_expert(arrivals.rows_of_expert);
  const OnDevice<std::int32_t> origin(made.origin);
  const OnDevice<std::int32_t> ends(made.expert_ends);
  const OnDevice<std::int32_t> rows_of_expert(made.rows_of_expert);
  const OnDevice<std::int8_t> last_equal(made.last_equal);
  const Arrivals in{.source = ConstTensorView(source.data(), DType::kInt32, {num_rows, 2}),
                    .topk_idx = ConstTensorView(ids.data(), DType::kInt64, {num_rows, arrivals.num_topk}),
                    .rows_per_expert = ConstTensorView(rows_per_expert.data(), DType::kInt32, {num_local})};
  ArrivalTables out;
  out.origin = TensorView(origin.data(), DType::kInt32, {num_rows, 2 + arrivals.num_topk});
  out.expert_ends = TensorView(ends.data(), DType::kInt32, {num_local});
  out.rows_of_expert = TensorView(rows_of_expert.data(), DType::kInt32, {num_local});
  out.last_equal = TensorView(last_equal.data(), DType::kInt8, {num_rows, arrivals.num_topk});
  const ArrivalTablesOptions options{.num_ranks = arrivals.num_ranks,
                                     .max_tokens = arrivals.max_tokens,
                                     .expert_alignment = arrivals.alignment,
                                     .expand = true,
                                     .backend = "cuda"};
  context.expect_ok(arrival_tables(in, options, out, thread_stream()), one.name());
  origin.read(made.origin);
  ends.read(made.expert_ends);
  rows_of_expert.read(made.rows_of_expert);
  last_equal.read(made.last_equal);
  return made;
}

ExpandedRows expand(RankContext& context, const ExpansionCase& one, const ExpansionTables& tables) {
  const std::int64_t num_rows = one.arrivals.num_rows;
  const int num_topk = one.arrivals.num_topk;
  ExpandedRows made = one.expanded(tables);
  made.spoil();
  const OnDevice<std::int32_t> origin(tables.origin);
  const OnDevice<std::int8_t> last_equal(tables.last_equal);
  const OnDevice<std::uint16_t> x(one.x);
  const OnDevice<std::int32_t> scales(one.scales);
  const OnDevice<float> weights(one.weights);
  const OnDevice<std::uint16_t> out_x(made.x);
  const OnDevice<std::int32_t> out_scales(made.scales);
  const OnDevice<float> out_weights(made.weights);
  const OnDevice<std::int32_t> row_of_slot(made.row_of_slot);
  ExpandInput in{.slots = ConstTensorView(static_cast<const std::int32_t*>(origin.data()) + 2, DType::kInt32,
                                          {num_rows, num_topk}, {2 + num_topk, 1}),
                 .x = ConstTensorView(x.data(), DType::kBfloat16, {num_rows, one.hidden}),
                 .weights = ConstTensorView(weights.data(), DType::kFloat32, {num_rows, num_topk}),
                 .last_equal = ConstTensorView(last_equal.data(), DType::kInt8, {num_rows, num_topk})};
  ExpandOutput out{.x = TensorView(out_x.data(), DType::kBfloat16, {one.num_slots, one.hidden}),
                   .weights = TensorView(out_weights.data(), DType::kFloat32, {one.num_slots}),
                   .row_of_slot = TensorView(row_of_slot.data(), DType::kInt32, {one.num_slots})};
  if (one.num_scales > 0) {
    in.scales = ConstTensorView(scales.data(), DType::kInt32, {num_rows, one.num_scales});
    out.scales = TensorView(out_scales.data(), DType::kInt32, {one.num_slots, one.num_scales});
  }
  context.expect_ok(expand_rows(in, kOnGpu, out, thread_stream()), one.name());
  out_x.read(made.x);
  out_scales.read(made.scales);
  out_weights.read(made.weights);
  row_of_slot.read(made.row_of_slot);
  return made;
}

ReducedRows reduce(RankContext& context, const ExpansionCase& one, const ExpansionTables& tables) {
  const std::int64_t num_rows = one.arrivals.num_rows;
  const int num_topk = one.arrivals.num_topk;
  ReducedRows made = one.reduced(tables);
  made.spoil();
  const OnDevice<std::int32_t> origin(tables.origin);
  const OnDevice<std::int8_t> last_equal(tables.last_equal);
  const OnDevice<std::uint16_t> x(one.expert_outputs);
  const OnDevice<float> weights(one.expert_weights);
  const OnDevice<std::uint16_t> rounded(made.rounded);
  const OnDevice<float> exact(made.exact);
  const OnDevice<float> out_weights(made.weights);
  ReduceInput in{.slots = ConstTensorView(static_cast<const std::int32_t*>(origin.data()) + 2, DType::kInt32,
                                          {num_rows, num_topk}, {2 + num_topk, 1}),
                 .x = ConstTensorView(x.data(), DType::kBfloat16, {one.num_slots, one.hidden}),
                 .last_equal = ConstTensorView(last_equal.data(), DType::kInt8, {num_rows, num_topk})};
  ReduceOutput out{.x = TensorView(exact.data(), DType::kFloat32, {num_rows, one.hidden})};
  context.expect_ok(reduce_rows(in, kOnGpu, out, thread_stream()), one.name());
  in.weights = ConstTensorView(weights.data(), DType::kFloat32, {one.num_slots});
  out = {.x = TensorView(rounded.data(), DType::kBfloat16, {num_rows, one.hidden}),
         .weights = TensorView(out_weights.data(), DType::kFloat32, {num_rows, num_topk})};
  context.expect_ok(reduce_rows(in, kOnGpu, out, thread_stream()), one.name());
  rounded.read(made.rounded);
  exact.read(made.exact);
  out_weights.read(made.weights);
  return made;
}

/// Parameter: number of cases; emulated GPUs run only a few.
class ExpansionCasesOnGpu : public testing::TestWithParam<int> {};

TEST_P(ExpansionCasesOnGpu, GiveTheBitsOfTheHost) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    std::mt19937_64 random(6);
    for (int i = 0; i < GetParam(); ++i) {
      const ExpansionCase one = draw_expansion_case(random, i % 20 == 0 ? 20000 : 600, i % 7 == 0 ? 300 : 12);
      const ExpansionTables tables = one.tables();
      context.expect(make_tables(context, one) == tables, one.name() + " tables");
      context.expect(expand(context, one, tables) == one.expanded(tables), one.name() + " expanded");
      context.expect(reduce(context, one, tables) == one.reduced(tables), one.name() + " reduced");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, ExpansionCasesOnGpu, testing::Values(8, 60), testing::PrintToStringParamName());

TEST(ExpansionOnGpu, RefusesHostMemory) {
  run_gpu_ranks({RankKind::kThreads, 1}, [](RankContext& context) {
    const std::vector<std::int32_t> slots{0};
    const OnDevice<std::int32_t> slots_on_gpu(slots);
    const std::vector<std::uint16_t> x(8);
    const OnDevice<std::uint16_t> x_on_gpu(x);
    std::vector<std::uint16_t> out(8, 7);
    const ConstTensorView table(slots_on_gpu.data(), DType::kInt32, {1, 1});
    const ConstTensorView rows(x_on_gpu.data(), DType::kBfloat16, {1, 8});
    const ExpansionOptions options{.backend = "cuda"};
    context.expect_code(expand_rows({.slots = table, .x = rows}, options,
                                    {.x = TensorView(out.data(), DType::kBfloat16, {1, 8})}, thread_stream()),
                        ErrorCode::kInvalidArgument, "expand_rows: output x");
    context.expect_code(reduce_rows({.slots = ConstTensorView(slots.data(), DType::kInt32, {1, 1}), .x = rows}, options,
                                    {.x = TensorView(x_on_gpu.data(), DType::kBfloat16, {1, 8})}, thread_stream()),
                        ErrorCode::kInvalidArgument, "reduce_rows: slots");
    context.expect(out.front() == 7, "the output is untouched");
  });
}

}  // namespace
}  // namespace ferry::test
