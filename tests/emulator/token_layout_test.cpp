/// The kernel of dispatch_layout, on cases like those of the host.

#include "cuda/local/token_layout.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

#include "emulator/emulator.hpp"
#include "support/layout_case.hpp"

namespace ferry::emulator {
namespace {

test::LayoutCounts count(const test::LayoutCase& one, const cuda::LayoutBlocks& blocks, std::uint64_t seed) {
  test::LayoutCounts counts = one.expected();
  for (auto* part : {&counts.per_rank, &counts.per_node, &counts.per_expert}) part->assign(part->size(), -7);
  counts.in_rank.assign(counts.in_rank.size(), 7);
  const plan::TokenLayoutParams params{.ids = one.ids.data(),
                                       .wide_ids = true,
                                       .num_tokens = one.num_tokens,
                                       .num_topk = one.num_topk,
                                       .num_experts = one.num_experts,
                                       .num_ranks = one.num_ranks,
                                       .ranks_per_node = one.ranks_per_node,
                                       .expert_to_rank = one.owners.empty() ? nullptr : one.owners.data(),
                                       .tokens_per_rank = counts.per_rank.data(),
                                       .tokens_per_node = counts.per_node.data(),
                                       .entries_per_expert = counts.per_expert.data(),
                                       .token_in_rank = counts.in_rank.data()};
  Machine machine(seed);
  EXPECT_EQ(cuda::launch_layout(params, blocks, machine.add_stream()), cudaSuccess);
  EXPECT_EQ(machine.run(), "");
  return counts;
}

/// `max_ranks`: a warp votes on 32 of them at a time.
void count_random_cases(int max_ranks) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 25; ++i) {
    const test::LayoutCase one = test::draw_layout_case(random, 300, max_ranks);
    EXPECT_EQ(count(one, {}, static_cast<std::uint64_t>(i)), one.expected()) << one.name();
  }
}

TEST(EmulatedTokenLayout, CountsTokensOfFewRanks) { count_random_cases(8); }

TEST(EmulatedTokenLayout, CountsTokensOfManyRanks) { count_random_cases(80); }

TEST(EmulatedTokenLayout, BlocksShareTheTokens) {
  std::mt19937_64 random(10);
  for (int i = 0; i < 6; ++i) {
    const test::LayoutCase one = test::draw_layout_case(random, 300, 8);
    EXPECT_EQ(count(one, {.num_blocks = 3}, static_cast<std::uint64_t>(i)), one.expected()) << one.name();
  }
}

/// So few tokens that blocks may have counted them before the kernel ahead has cleared.
TEST(EmulatedTokenLayout, BlocksBeginWhileTheirCountsAreCleared) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 40; ++i) {
    const test::LayoutCase one = test::draw_layout_case(random, 20, 8);
    EXPECT_EQ(count(one, {.num_blocks = 2, .overlap = true}, static_cast<std::uint64_t>(i)), one.expected())
        << one.name();
  }
}

}  // namespace
}  // namespace ferry::emulator
