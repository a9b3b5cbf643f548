/// Calls around number 2^32, where the lower halves of epochs in progress words wrap to 0.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>

#include "cuda/context/first_epoch.hpp"
#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;
constexpr std::uint64_t kWrap = std::uint64_t{1} << 32;
/// Epochs of one case below, and one more.
constexpr std::uint64_t kEpochsPerCase = 6;
constexpr int kNumCases = 3;
/// Deadline for many groups in a row.
constexpr std::chrono::seconds kDeadline{240};

/// Makes groups of this process, and of processes that it forks, count from `epoch` while this object exists.
class FirstEpoch {
 public:
  explicit FirstEpoch(std::uint64_t epoch) { cuda::count_epochs_from(epoch); }
  ~FirstEpoch() { cuda::count_epochs_from(0); }
  FirstEpoch(const FirstEpoch&) = delete;
  FirstEpoch& operator=(const FirstEpoch&) = delete;
};

/// Cases with different contents, so that rows of one case are wrong in the next; large enough that rows are still in
/// transit when receivers first poll.
std::vector<PreparedCase> cases_of(Layout layout, MemoryKind memory) {
  std::vector<PreparedCase> cases;
  for (int i = 0; i < kNumCases; ++i) {
    ExchangeCase one;
    one.name = fmt::format("layout {} memory {} case {}", static_cast<int>(layout), static_cast<int>(memory), i);
    one.world = {.num_ranks = kNumRanks, .num_topk = 4, .num_experts = 9, .max_tokens = 256, .layout = layout};
    one.world.seed = static_cast<std::uint64_t>(500 + i);
    one.memory = memory;
    one.dispatches = {{.hidden = 512, .num_scales = 3}, {.dtype = DType::kFloat32, .hidden = 128}};
    one.combines = {{.hidden = 512, .weighted = true, .return_weights = true},
                    {.dtype = DType::kFloat32, .hidden = 128, .num_biases = 1}};
    cases.push_back(prepare(one));
  }
  return cases;
}

void run_across_the_wrap(RankContext& context, const std::vector<PreparedCase>& cases, CopyPath path) {
  auto group = Group::create(context.bootstrap(), gpu_group_options());
  if (!context.expect_ok(group.status(), "Group::create")) return;
  for (const PreparedCase& one : cases) {
    check_case(context, **group, one, {.chunk_tokens = 64, .copy_path = path});
  }
  context.expect_ok((*group)->destroy(), "destroy");
}

/// Runs groups whose call number 2^32 is epoch `at` (from 1) of their second case.
void expect_right_across_the_wrap(RankKind kind, std::uint64_t at, const std::vector<MemoryKind>& memory_kinds,
                                  const std::vector<CopyPath>& paths) {
  const FirstEpoch first(kWrap - kEpochsPerCase - at);
  std::vector<std::vector<PreparedCase>> all;
  for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab})
    for (MemoryKind memory : memory_kinds) all.push_back(cases_of(layout, memory));
  run_gpu_ranks({kind, kNumRanks, kDeadline}, [&](RankContext& context) {
    for (const std::vector<PreparedCase>& cases : all) {
      for (CopyPath path : paths) run_across_the_wrap(context, cases, path);
    }
  });
}

/// Parameter: the epoch of a case that is number 2^32.
class EpochWrap : public testing::TestWithParam<std::uint64_t> {};

TEST_P(EpochWrap, ThreadsByBothCopyPaths) {
  expect_right_across_the_wrap(RankKind::kThreads, GetParam(), {MemoryKind::kPlain, MemoryKind::kMixed},
                               {CopyPath::kAuto, CopyPath::kLoadStore});
}

TEST_P(EpochWrap, Processes) {
  expect_right_across_the_wrap(RankKind::kProcesses, GetParam(), {MemoryKind::kPlain}, {CopyPath::kAuto});
}

std::string name_of(std::uint64_t at) {
  constexpr std::array kNames = {"exchange", "place", "dispatch", "second_dispatch", "combine", "second_combine"};
  static_assert(kNames.size() == kEpochsPerCase);
  return kNames[at - 1];
}

INSTANTIATE_TEST_SUITE_P(At, EpochWrap, testing::Range(std::uint64_t{1}, kEpochsPerCase + 1),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace
}  // namespace ferry::test
