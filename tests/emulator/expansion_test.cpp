/// The kernels of expand_rows and reduce_rows, and of the tables before them, on cases like those of the host.

#include "cuda/local/expansion.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/local/arrival_tables.hpp"
#include "emulator/emulator.hpp"
#include "support/expansion_case.hpp"

namespace ferry::emulator {
namespace {

constexpr int kNumSms = 2;

template <typename Launch>
void run(int seed, Launch launch) {
  Machine machine(static_cast<std::uint64_t>(seed));
  ASSERT_EQ(launch(machine.add_stream()), cudaSuccess);
  ASSERT_EQ(machine.run(), "");
}

plan::SlotTable slots_of(const test::ExpansionCase& one, const test::ExpansionTables& tables) {
  return {.slots = tables.origin.data() + 2,
          .last_equal = tables.last_equal.data(),
          .stride = 2 + one.arrivals.num_topk,
          .num_rows = one.arrivals.num_rows,
          .num_slots = one.num_slots,
          .num_topk = one.arrivals.num_topk};
}

void check_tables(const test::ExpansionCase& one, const test::ExpansionTables& expected, int seed) {
  const test::ArrivalCase& arrivals = one.arrivals;
  test::ExpansionTables made{std::vector<std::int32_t>(expected.origin.size(), -7),
                             std::vector<std::int32_t>(expected.expert_ends.size(), -7),
                             std::vector<std::int32_t>(expected.rows_of_expert.size(), -7),
                             std::vector<std::int8_t>(expected.last_equal.size(), -7)};
  const plan::ArrivalParams params{.source = arrivals.source.data(),
                                   .ids = arrivals.ids.data(),
                                   .wide_ids = true,
                                   .num_topk = arrivals.num_topk,
                                   .num_ranks = arrivals.num_ranks,
                                   .num_rows = arrivals.num_rows,
                                   .max_tokens = arrivals.max_tokens,
                                   .rows_per_expert = arrivals.rows_of_expert.data(),
                                   .num_experts = arrivals.num_local(),
                                   .expert_alignment = arrivals.alignment,
                                   .expand = true,
                                   .origin = made.origin.data(),
                                   .expert_ends = made.expert_ends.data(),
                                   .rows_of_expert = made.rows_of_expert.data(),
                                   .last_equal = made.last_equal.data()};
  run(seed, [&](cudaStream_t stream) { return cuda::launch_arrivals(params, stream); });
  EXPECT_EQ(made, expected) << one.name();
}

void check_expanded(const test::ExpansionCase& one, const test::ExpansionTables& tables, int seed) {
  const test::ExpandedRows expected = one.expanded(tables);
  test::ExpandedRows made = expected;
  made.spoil();
  const auto columns = [&](const std::vector<std::int32_t>& scales) {
    return plan::ScaleColumns{reinterpret_cast<std::uint32_t*>(const_cast<std::int32_t*>(scales.data())),
                              one.num_scales, 1};
  };
  plan::ExpandParams params{.table = slots_of(one, tables),
                            .zero_padding = true,
                            .row_bytes = one.hidden * 2,
                            .x = reinterpret_cast<const std::byte*>(one.x.data()),
                            .out_x = reinterpret_cast<std::byte*>(made.x.data()),
                            .num_scales = one.num_scales,
                            .scales = columns(one.scales),
                            .out_scales = columns(made.scales),
                            .weights = one.weights.data(),
                            .out_weights = made.weights.data(),
                            .row_of_slot = made.row_of_slot.data()};
  run(seed, [&](cudaStream_t stream) { return cuda::launch_expand(params, kNumSms, stream); });
  EXPECT_EQ(made, expected) << one.name();
  // Nothing but the rows that are named, which only have to be copied again.
  made.x.assign(made.x.size(), 0);
  params.zero_padding = false;
  params.weights = nullptr;
  params.out_weights = nullptr;
  params.row_of_slot = nullptr;
  run(seed, [&](cudaStream_t stream) { return cuda::launch_expand(params, kNumSms, stream); });
  EXPECT_EQ(made, expected) << one.name();
}

void check_reduced(const test::ExpansionCase& one, const test::ExpansionTables& tables, int seed) {
  const test::ReducedRows expected = one.reduced(tables);
  test::ReducedRows made = expected;
  made.spoil();
  plan::ReduceParams params{.table = slots_of(one, tables),
                            .hidden = one.hidden,
                            .x = reinterpret_cast<const std::byte*>(one.expert_outputs.data()),
                            .out_x = reinterpret_cast<std::byte*>(made.rounded.data()),
                            .weights = one.expert_weights.data(),
                            .out_weights = made.weights.data()};
  run(seed, [&](cudaStream_t stream) { return cuda::launch_reduce(params, kNumSms, stream); });
  params.rounds = false;
  params.out_x = reinterpret_cast<std::byte*>(made.exact.data());
  params.out_weights = nullptr;
  run(seed, [&](cudaStream_t stream) { return cuda::launch_reduce(params, kNumSms, stream); });
  EXPECT_EQ(made, expected) << one.name();
}

TEST(EmulatedExpansion, GivesTheBitsOfTheHost) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 30; ++i) {
    // Now and then more rows than a block looks at together.
    const test::ExpansionCase one = test::draw_expansion_case(random, i % 15 == 0 ? 3000 : 100, i % 7 == 0 ? 40 : 6);
    const test::ExpansionTables tables = one.tables();
    check_tables(one, tables, i);
    check_expanded(one, tables, i);
    check_reduced(one, tables, i);
  }
}

}  // namespace
}  // namespace ferry::emulator
