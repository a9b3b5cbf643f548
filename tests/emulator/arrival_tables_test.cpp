/// The kernel of arrival_tables, on cases like those of the host.

#include "cuda/local/arrival_tables.hpp"

#include <gtest/gtest.h>

#include <random>

#include "emulator/emulator.hpp"
#include "support/arrival_case.hpp"

namespace ferry::emulator {
namespace {

TEST(EmulatedArrivalTables, DescribesRandomRows) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 40; ++i) {
    const test::ArrivalCase one = test::draw_arrival_case(random, 700, 40);
    test::ArrivalResults made = one.spoiled();
    const plan::ArrivalParams params{.source = one.source.data(),
                                     .ids = one.ids.data(),
                                     .wide_ids = true,
                                     .num_topk = one.num_topk,
                                     .num_ranks = one.num_ranks,
                                     .num_rows = one.num_rows,
                                     .max_tokens = one.max_tokens,
                                     .rows_per_expert = one.rows_of_expert.data(),
                                     .num_experts = one.num_local(),
                                     .expert_alignment = one.alignment,
                                     .sent_ids = one.sent.data(),
                                     .num_sent_ids = one.num_tokens * one.num_topk,
                                     .origin = made.origin.data(),
                                     .rows_through_rank = made.rows_through_rank.data(),
                                     .expert_ends = made.expert_ends.data(),
                                     .sent_ids_copy = made.sent_idx.data()};
    Machine machine(static_cast<std::uint64_t>(i));
    ASSERT_EQ(cuda::launch_arrivals(params, machine.add_stream()), cudaSuccess);
    ASSERT_EQ(machine.run(), "");
    EXPECT_EQ(made, one.expected()) << one.name();
  }
}

}  // namespace
}  // namespace ferry::emulator
