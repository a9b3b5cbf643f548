/// Minimal exchange, small enough to run under slow tools.

#include <gtest/gtest.h>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

std::vector<PreparedCase> small_cases(int num_ranks) {
  std::vector<PreparedCase> cases;
  for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
    for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
      ExchangeCase one;
      one.name = "small";
      one.world = {.num_ranks = num_ranks, .num_topk = 2, .num_experts = 5, .max_tokens = 7, .layout = layout};
      one.world.spare_recv_rows = memory == MemoryKind::kPlain ? 3 : -1;
      one.memory = memory;
      one.dispatches = {{.num_scales = 2, .zero_padding = true}};
      one.combines = {{.weighted = true, .num_biases = 1, .return_weights = true}};
      cases.push_back(prepare(one));
    }
  }
  return cases;
}

void run_small_cases(RankKind kind, int num_ranks) {
  const std::vector<PreparedCase> cases = small_cases(num_ranks);
  run_gpu_group(kind, num_ranks, [&](RankContext& context, Group& group) {
    context.expect(group.backend() == "cuda", "not a CUDA group");
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

TEST(SmallExchange, OneRank) { run_small_cases(RankKind::kThreads, 1); }
TEST(SmallExchange, TwoThreads) { run_small_cases(RankKind::kThreads, 2); }
TEST(SmallExchange, TwoProcesses) { run_small_cases(RankKind::kProcesses, 2); }

TEST(SmallExchange, OneRankOnTheDefaultStream) {
  const std::vector<PreparedCase> cases = small_cases(1);
  run_gpu_group(RankKind::kThreads, 1, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) {
      Round round(context, group, one);
      if (!round.start(context, group, Stream{})) return;
      if (context.expect_ok(group.wait(Stream{}), "wait")) round.expect_received(context);
    }
  });
}

}  // namespace
}  // namespace ferry::test
