/// More ranks than a warp has lanes: where a lane stands for a rank, it then stands for two.

#include <gtest/gtest.h>

#include <chrono>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 33;
constexpr std::chrono::seconds kDeadline{200};
constexpr std::int64_t kTimeoutNs = 120 * kNsPerSecond;

PreparedCase many_ranks_case(Layout layout, MemoryKind memory) {
  ExchangeCase one;
  one.name = layout == Layout::kTokens ? "tokens" : "experts";
  one.world = {.num_ranks = kNumRanks, .num_topk = 8, .num_experts = 2 * kNumRanks + 1, .layout = layout};
  one.world.max_tokens = 24;
  one.world.expert_alignment = 4;
  one.memory = memory;
  one.dispatches = {{.hidden = 264, .num_scales = 3, .zero_padding = true}};
  one.combines = {{.hidden = 264, .weighted = true, .num_biases = 1, .return_weights = true}};
  return prepare(one);
}

/// On one GPU, streams of two ranks would share one of its 32 connections, and their kernels would wait for each other.
/// As processes, so many ranks need more memory for CUDA's contexts than two GPUs have.
TEST(ManyRanks, Threads) {
  if (num_device_files() < 2) GTEST_SKIP() << "needs two GPUs, this machine has " << num_device_files();
  const std::vector<PreparedCase> cases = {many_ranks_case(Layout::kTokens, MemoryKind::kPlain),
                                           many_ranks_case(Layout::kExperts, MemoryKind::kSymmetric)};
  run_gpu_ranks({RankKind::kThreads, kNumRanks, kDeadline}, [&](RankContext& context) {
    GroupOptions options = gpu_group_options();
    options.timeout_ns = kTimeoutNs;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    for (const PreparedCase& one : cases) check_case(context, **group, one);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

}  // namespace
}  // namespace ferry::test
