/// Ways in which ranks access each other's memory: all give the same results, also side by side.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <string>

#include "cuda/memory/deferred_free.hpp"
#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr const char* kVariable = "FERRY_CUDA_MEMORY";
constexpr int kNumRanks = 3;

/// Sets the variable in this process and in those that it forks meanwhile.
class MemoryPathVariable {
 public:
  explicit MemoryPathVariable(const std::string& value) { setenv(kVariable, value.c_str(), 1); }
  ~MemoryPathVariable() { unsetenv(kVariable); }
  MemoryPathVariable(const MemoryPathVariable&) = delete;
  MemoryPathVariable& operator=(const MemoryPathVariable&) = delete;
};

std::vector<PreparedCase> cases() {
  std::vector<PreparedCase> all;
  for (MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    ExchangeCase one;
    one.name = memory == MemoryKind::kPlain ? "plain" : "symmetric";
    one.world = {.num_ranks = kNumRanks, .num_topk = 3, .num_experts = 12, .max_tokens = 200};
    one.memory = memory;
    one.dispatches = {{.hidden = 512, .num_scales = 4}};
    one.combines = {{.hidden = 512, .num_biases = 1, .return_weights = true}};
    all.push_back(prepare(one));
  }
  return all;
}

void run_cases(RankKind kind) {
  const std::vector<PreparedCase> all = cases();
  run_gpu_group(kind, kNumRanks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : all) check_case(context, group, one);
  });
}

TEST(MemoryPath, IpcServesThreads) {
  const MemoryPathVariable variable("ipc");
  run_cases(RankKind::kThreads);
}

TEST(MemoryPath, IpcServesProcesses) {
  const MemoryPathVariable variable("ipc");
  run_cases(RankKind::kProcesses);
}

TEST(MemoryPath, RanksWithDifferentPathsMeetProcesses) {
  const std::vector<PreparedCase> all = cases();
  run_gpu_ranks({RankKind::kProcesses, kNumRanks}, [&](RankContext& context) {
    const MemoryPathVariable variable(context.rank() == 1 ? "ipc" : "vmm");
    auto group = Group::create(context.bootstrap(), gpu_group_options());
    if (!context.expect_ok(group.status(), "Group::create")) return;
    for (const PreparedCase& one : all) check_case(context, **group, one);
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

/// A rank leaves while a late rank still has its memory open and may write there.
TEST(MemoryPath, IpcMemoryRestsUntilLateProcessesLetGoOfIt) {
  const MemoryPathVariable variable("ipc");
  run_gpu_ranks({RankKind::kProcesses, 2}, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), gpu_group_options());
    if (!context.expect_ok(group.status(), "Group::create")) return;
    meet(context);
    if (context.rank() == 0) {
      group->reset();
      context.expect(cuda::num_resting_blocks() == 1, "the memory was freed under a late rank");
      meet(context);
      meet(context);
    } else {
      meet(context);
      group->reset();  // rank 0 closed this rank's memory long ago
      context.expect(cuda::num_resting_blocks() == 0, "memory is kept although no rank has it open");
      meet(context);
    }
    { const cuda::LiveGroup next; }
    context.expect(cuda::num_resting_blocks() == 0, "memory is kept forever");
  });
}

TEST(MemoryPath, AnUnknownOneIsRefused) {
  const MemoryPathVariable variable("paper");
  run_gpu_ranks({RankKind::kThreads, 2}, [](RankContext& context) {
    const Status status = Group::create(context.bootstrap(), gpu_group_options()).status();
    if (!context.expect_code(status, ErrorCode::kInvalidArgument, "Group::create")) return;
    context.expect(status.message().find("\"paper\"") != std::string_view::npos, status.message());
  });
}

}  // namespace
}  // namespace ferry::test
