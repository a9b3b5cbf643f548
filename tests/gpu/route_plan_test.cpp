/// The kernels of route against the functions of src/plan, bit by bit.

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

INSTANTIATE_TEST_SUITE_P(Ranks, RoutePlanOnGpu, testing::Values(1, 2, 3, 8),
                         [](const auto& test) { return fmt::format("{}_threads", test.param); });

}  // namespace
}  // namespace ferry::test
