/// Groups must load all kernels of their calls when they are created. CUDA may load a kernel at its first launch and
/// then wait for an idle GPU; if ranks share one, it would wait for kernels that wait for this rank.

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "emulated_gpus/host.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;

class GroupsLoadKernels : public testing::TestWithParam<int> {};

TEST_P(GroupsLoadKernels, ThatTheirCallsLaunch) {
  const int ranks_per_node = GetParam();
  std::mt19937_64 random(78);
  std::vector<PreparedCase> cases;
  for (int i = 0; i < 5; ++i) {
    ExchangeCase one = draw_case(random, kNumRanks);
    one.world.num_ranks = kNumRanks;
    one.world.ranks_per_node = ranks_per_node;
    cases.push_back(prepare(one));
  }
  const std::vector<PreparedCase> decode = latency_cases_of_equal_shapes(kNumRanks, 1, false, ranks_per_node);
  run_gpu_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [&](RankContext& context) {
    GroupOptions options = latency_group_options(decode);
    options.ranks_per_node = ranks_per_node;
    options.transport = "loopback";
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    meet(context);
    const int num_before = emulated::num_kernels_loaded_by_launches();
    for (const PreparedCase& one : cases) check_case(context, **group, one);
    check_latency_case(context, **group, decode.front(), Halves::kTogether);
    // Over nodes both use the same kernels.
    if (ranks_per_node == kNumRanks) check_latency_case(context, **group, decode.front(), Halves::kSplit);
    meet(context);
    context.expect(emulated::num_kernels_loaded_by_launches() == num_before, "calls loaded kernels");
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

INSTANTIATE_TEST_SUITE_P(RanksOfANode, GroupsLoadKernels, testing::Values(kNumRanks, 1));

}  // namespace
}  // namespace ferry::test
