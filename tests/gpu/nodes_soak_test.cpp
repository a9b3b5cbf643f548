/// GPU ranks on several emulated nodes make thousands of calls of every kind with few waits in between, with any rank
/// late. Every result is the oracle's, and the memory of the group and of the process does not grow.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <random>

#include "gpu/latency_group.hpp"
#include "support/process_usage.hpp"
#include "support/sanitizers.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kRanksPerNode = 2;
/// Cases of route, dispatch and combine, and of pairs of latency mode; a step makes each case once.
constexpr int kNumCases = 2;
constexpr int kCallsAStep = kNumCases * (3 + 2);
/// After this many steps, each of the blocks that calls use in turn has been used for each case.
constexpr int kNumWarmSteps = 3;
constexpr std::uint64_t kCallsPerDelay = 4;
constexpr std::uint64_t kLongestDelayUs = 300;

/// Memory that may be held beyond that held when warm. Group: pages of a few placements, which Routings may or may not
/// share. Operator new: growth of vectors. Heap, CUDA's driver included: less than 32 bytes, the smallest block, for
/// each of 10,000 calls of each rank.
constexpr std::size_t kSpareGroupBytes = 8 * 4096;
constexpr std::size_t kSpareNewBytes = std::size_t{256} << 10;
constexpr std::size_t kSpareHeapBytes = std::size_t{1} << 20;

struct Cases {
  std::vector<PreparedCase> rounds;
  std::vector<PreparedCase> pairs;
};

/// Prepares small cases: only the number of calls matters.
Cases prepare_cases() {
  Cases cases;
  for (const Layout layout : {Layout::kTokens, Layout::kExperts}) {
    ExchangeCase one;
    one.name = fmt::format("round {}", cases.rounds.size());
    one.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 2 * kNumRanks, .max_tokens = 16};
    one.world.ranks_per_node = kRanksPerNode;
    one.world.layout = layout;
    one.world.seed = cases.rounds.size();
    one.dispatches = {{.hidden = 256}};
    one.combines = {{.hidden = 256, .weighted = true}};
    cases.rounds.push_back(prepare(one));
  }
  cases.pairs = latency_cases_of_equal_shapes(kNumRanks, kNumCases, true, kRanksPerNode);
  return cases;
}

/// Calls of one rank.
class Soak {
 public:
  Soak(RankContext& context, Group& group, const Cases& cases)
      : context_(context), group_(group), cases_(cases), stream_(context) {
    for (const PreparedCase& one : cases.rounds) rounds_.push_back(std::make_unique<Round>(context, group, one));
    for (const PreparedCase& one : cases.pairs) pairs_.push_back(std::make_unique<LatencyPair>(context, group, one));
  }

  void run(int num_calls) {
    const int num_steps = num_calls / kCallsAStep;
    for (int step = 0; step < num_steps; ++step) {
      meet(context_);  // no rank fills while others wait inside a kernel
      if (!make_calls(step) || !context_.expect_ok(group_.wait(stream_.get()), "wait")) return;
      look();
      meet(context_);
      if (step + 1 >= kNumWarmSteps) take_stock();
      if (!context_.failures().empty()) return context_.fail(fmt::format("failed in step {}", step));
    }
  }

 private:
  bool make_calls(int step) {
    for (std::size_t i = 0; i < kNumCases; ++i) {
      perhaps_be_late();
      if (!rounds_[i]->start(context_, group_, stream_.get())) return false;
      perhaps_be_late();
      const bool split = (static_cast<std::size_t>(step) + i) % 2 == 0;
      const Status status = pairs_[i]->start(group_, stream_.get(), split);
      if (!context_.expect_ok(status, fmt::format("pair {} of step {}", i, step))) return false;
    }
    return true;
  }

  /// All ranks draw the same values.
  void perhaps_be_late() {
    const auto late_rank = static_cast<int>(random_() % kNumRanks);
    const auto late_by = static_cast<std::int64_t>(random_() % kLongestDelayUs);
    const bool anyone = random_() % kCallsPerDelay == 0;
    if (anyone && late_rank == context_.rank()) enqueue_delay(stream_.get(), std::chrono::microseconds(late_by));
  }

  void look() {
    for (std::size_t i = 0; i < kNumCases; ++i) {
      rounds_[i]->expect_received(context_);
      rounds_[i]->refill(context_, cases_.rounds[i]);
      pairs_[i]->expect_received(context_);
      pairs_[i]->refill(context_, cases_.pairs[i]);
    }
  }

  /// Checks memory. Ranks are threads of one process: one of them measures it while the others wait.
  void take_stock() {
    const std::size_t held = group_.memory_usage().total_bytes();
    if (group_bytes_ == 0) group_bytes_ = held;
    context_.expect(held <= group_bytes_ + kSpareGroupBytes,
                    fmt::format("the group holds {} bytes after {}", held, group_bytes_));
    meet(context_);
    if (context_.rank() == 0) measure_process();
    meet(context_);
  }

  void measure_process() {
    const ProcessUsage now = process_usage();
    if (!warm_) warm_ = now;
    context_.expect(now.num_descriptors <= warm_->num_descriptors, "descriptors are left open");
    if (kSanitized) return;  // a sanitizer keeps freed memory
    context_.expect(now.new_bytes <= warm_->new_bytes + kSpareNewBytes,
                    fmt::format("{} bytes of operator new after {}", now.new_bytes, warm_->new_bytes));
    context_.expect(now.heap_bytes <= warm_->heap_bytes + kSpareHeapBytes,
                    fmt::format("a heap of {} bytes after {}", now.heap_bytes, warm_->heap_bytes));
  }

  RankContext& context_;
  Group& group_;
  const Cases& cases_;
  const RankStream stream_;
  std::mt19937_64 random_{77};
  std::vector<std::unique_ptr<Round>> rounds_;
  std::vector<std::unique_ptr<LatencyPair>> pairs_;
  std::size_t group_bytes_ = 0;
  std::optional<ProcessUsage> warm_;
};

class GpuNodesSoak : public testing::TestWithParam<int> {};

TEST_P(GpuNodesSoak, NothingIsWrongAndNothingGrows) {
  const Cases cases = prepare_cases();
  run_gpu_ranks({RankKind::kThreads, kNumRanks}, [&](RankContext& context) {
    GroupOptions options = latency_group_options(cases.pairs);
    options.ranks_per_node = kRanksPerNode;
    options.transport = "loopback";
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    Soak(context, **group, cases).run(GetParam());
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

/// Few calls where a call takes long, as on emulated GPUs.
INSTANTIATE_TEST_SUITE_P(Calls, GpuNodesSoak, testing::Values(4 * kCallsAStep, 10000),
                         [](const auto& test) { return std::to_string(test.param); });

}  // namespace
}  // namespace ferry::test
