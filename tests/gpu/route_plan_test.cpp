/// Tests of route's kernels against the functions of src/plan, bit by bit.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>

#include "gpu/gpu_group.hpp"
#include "support/exchange_check.hpp"
#include "support/planned_routing.hpp"

namespace ferry::test {
namespace {

class RoutePlanOnGpu : public testing::TestWithParam<int> {};

TEST_P(RoutePlanOnGpu, KernelsGiveThePlansRows) {
  const int num_ranks = GetParam();
  std::mt19937_64 random(11);
  std::vector<PreparedCase> cases;
  while (cases.size() < 24) {
    ExchangeCase one;
    one.name = fmt::format("world {}", cases.size());
    one.world = draw_world_spec(random, num_ranks);
    if (!oracle::route(make_world(one.world)).ok()) continue;  // too many rows on purpose
    cases.push_back(prepare(one));
    cases.back().routings = planned_routings(cases.back().world);
  }
  run_gpu_group(RankKind::kThreads, num_ranks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_route(context, group, one);
  });
}

// A rank without tokens expects no rows, and finds that its table is too small for the rows of the others. The next
// time it expects as many, until it gets more.
TEST_P(RoutePlanOnGpu, RowsMayBeMoreThanARankExpects) {
  const int num_ranks = GetParam();
  std::vector<PreparedCase> cases;
  for (const Layout layout : {Layout::kTokens, Layout::kExperts}) {
    for (const std::int64_t max_tokens : {200, 100, 700}) {
      ExchangeCase one;
      one.name = fmt::format("{} tokens on every other rank", max_tokens);
      one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 16, .max_tokens = max_tokens};
      one.world.counts = TokenCounts::kSomeZero;
      one.world.layout = layout;
      one.world.expert_alignment = layout == Layout::kExperts ? 16 : 1;
      cases.push_back(prepare(one));
      cases.back().routings = planned_routings(cases.back().world);
    }
  }
  // One of the ranks expects the right number, because max_recv_rows gives it.
  cases.push_back(cases.back());
  cases.back().world.max_recv_rows.assign(static_cast<std::size_t>(num_ranks), 0);
  cases.back().world.max_recv_rows.back() = cases.back().routings.back().num_used_rows + 3;
  cases.back().routings = planned_routings(cases.back().world);
  run_gpu_group(RankKind::kThreads, num_ranks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_route(context, group, one);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RoutePlanOnGpu, testing::Values(1, 2, 3, 8),
                         [](const auto& test) { return fmt::format("{}_threads", test.param); });

}  // namespace
}  // namespace ferry::test
