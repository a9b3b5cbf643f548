/// Latency mode without lost ranks, in cases that need a GPU: in graphs, and when a process is killed. Results of calls
/// are tested in tests/conformance.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <vector>

#include "fault/trap_memory.hpp"
#include "gpu/latency_group.hpp"
#include "gpu/on_device.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;
constexpr int kVictim = 1;
/// Timeout for a rank that lives: longer than ranks that share a GPU wait for their turn; and for a rank that dies: far
/// longer than noticing its death takes.
constexpr std::int64_t kSoonNs = 5 * kNsPerSecond;
constexpr std::int64_t kFarNs = 60 * kNsPerSecond;

std::vector<PreparedCase> without_victim(const std::vector<PreparedCase>& cases) {
  std::vector<PreparedCase> left;
  for (const PreparedCase& one : cases) {
    ExchangeCase spec = one.spec;
    spec.name += fmt::format(" without rank {}", kVictim);
    spec.masked = {kVictim};
    left.push_back(prepare(spec));
  }
  return left;
}

/// Makes pairs of calls of equal shapes on one stream, or replays one pair.
class Pairs {
 public:
  Pairs(RankContext& context, Group& group, const PreparedCase& first, bool captured)
      : context_(context), group_(group), stream_(context), pair_(context, group, first) {
    if (!captured) return;
    meet(context);
    graph_.emplace();
    graph_->begin(stream_.get());
    const Status status = pair_.start(group, stream_.get(), false);
    graph_->end();
    context.expect_ok(status, "capturing");
    graph_->prepare();
  }

  /// Threads meet before and after, so that no rank fills memory while others wait inside a kernel. `takes_part`:
  /// whether this rank does more than that.
  void make_together(const PreparedCase& one, bool split, bool takes_part = true) {
    if (takes_part) pair_.refill(context_, one);
    meet(context_);
    if (takes_part) start(one, split);
    meet(context_);
    if (takes_part) pair_.expect_received(context_);
  }
  void make(const PreparedCase& one, bool split) {
    pair_.refill(context_, one);
    start(one, split);
    pair_.expect_received(context_);
  }

  void expect_masked(const std::vector<std::int32_t>& expected) {
    const OnDevice<std::int32_t> out(std::vector<std::int32_t>(kNumRanks, -1));
    const TensorView view(const_cast<void*>(static_cast<const void*>(out.data())), DType::kInt32, {kNumRanks});
    context_.expect_ok(group_.latency_query_mask(view, stream_.get()), "latency_query_mask");
    context_.expect_ok(group_.wait(stream_.get()), "wait");
    std::vector<std::int32_t> seen(kNumRanks);
    out.read(seen);
    context_.expect(seen == expected, fmt::format("mask is [{}]", fmt::join(seen, ", ")));
  }

 private:
  void start(const PreparedCase& one, bool split) {
    Status status;
    if (graph_) {
      graph_->launch();
    } else {
      status = pair_.start(group_, stream_.get(), split);
    }
    context_.expect_ok(status.ok() ? group_.wait(stream_.get()) : status, one.spec.name);
  }

  RankContext& context_;
  Group& group_;
  RankStream stream_;
  LatencyPair pair_;
  std::optional<CapturedGraph> graph_;
};

class LatencyMask : public testing::TestWithParam<bool> {
 protected:
  bool captured() const { return GetParam(); }
  std::shared_ptr<Group> make_group(RankContext& context, std::int64_t mask_timeout_ns) const {
    GroupOptions options = latency_group_options(whole_);
    options.mask_lost_ranks = true;
    options.mask_timeout_ns = mask_timeout_ns;
    auto group = Group::create(context.bootstrap(), options);
    return context.expect_ok(group.status(), "Group::create") ? *group : nullptr;
  }

  std::vector<PreparedCase> whole_ = latency_cases_of_equal_shapes(kNumRanks, 3);
  std::vector<PreparedCase> left_ = without_victim(whole_);
};

/// The victim lives but makes no more calls.
TEST_P(LatencyMask, ThreadsGoOnWithoutOneThatStops) {
  run_gpu_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [&](RankContext& context) {
    const auto group = make_group(context, kSoonNs);
    if (group == nullptr) return;
    Pairs pairs(context, *group, whole_.front(), captured());
    const bool survives = context.rank() != kVictim;
    for (const PreparedCase& one : whole_) pairs.make_together(one, false);
    for (const PreparedCase& one : left_) pairs.make_together(one, true, survives);
    if (survives) pairs.expect_masked({0, 1, 0});
    meet(context);
  });
}

/// All ranks mask the victim by hand, and it makes the same calls alone; then all unmask it.
TEST_P(LatencyMask, ThreadsTakeOneBack) {
  run_gpu_ranks({.kind = RankKind::kThreads, .num_ranks = kNumRanks}, [&](RankContext& context) {
    const auto group = make_group(context, kFarNs);
    if (group == nullptr) return;
    const bool victim = context.rank() == kVictim;
    Pairs pairs(context, *group, whole_.front(), captured());
    std::vector<PreparedCase> alone;
    for (const PreparedCase& one : whole_) {
      ExchangeCase spec = one.spec;
      spec.masked = {0, 2};
      alone.push_back(prepare(spec));
    }
    for (int round = 0; round < 2; ++round) {
      for (const PreparedCase& one : whole_) pairs.make_together(one, false);
      if (!victim) context.expect_ok(group->latency_update_mask(kVictim, true), "latency_update_mask");
      context.expect_ok(group->wait(), "wait");
      for (const PreparedCase& one : victim ? alone : left_) pairs.make_together(one, false);
      pairs.expect_masked(victim ? std::vector<std::int32_t>{1, 0, 1} : std::vector<std::int32_t>{0, 1, 0});
      meet(context);
      context.expect_ok(group->latency_clear_mask(), "latency_clear_mask");
      context.expect_ok(group->wait(), "wait");
      meet(context);
    }
    for (const PreparedCase& one : whole_) pairs.make_together(one, false);
  });
}

TEST_P(LatencyMask, ProcessesGoOnWithoutOneThatIsKilled) {
  SharedWords* const words = make_shared_words();
  const RankRun run{.kind = RankKind::kProcesses, .num_ranks = kNumRanks};
  const std::vector<std::string> failures = collect_gpu_rank_failures(run, [&](RankContext& context) {
    const auto group = make_group(context, kFarNs);
    if (group == nullptr) return;
    Pairs pairs(context, *group, whole_.front(), captured());
    meet(context);
    for (const PreparedCase& one : whole_) pairs.make(one, false);
    if (context.rank() == kVictim) (void)raise(SIGKILL);
    const std::int64_t begin_ns = node::monotonic_ns();
    for (const PreparedCase& one : left_) pairs.make(one, true);
    const std::int64_t took_ns = node::monotonic_ns() - begin_ns;
    context.expect(took_ns < kFarNs / 2, fmt::format("took {} ms", took_ns / 1'000'000));
    pairs.expect_masked({0, 1, 0});
    // More than the free part of the memory that the ranks have mapped.
    context.expect_ok(group->allocate(std::size_t{16} << 20).status(), "allocate");
    report_survivor_done(words);
    // Not earlier: a rank that has left is masked too.
    wait_for_survivors(words, kNumRanks - 1);
  });
  EXPECT_EQ(failures, std::vector<std::string>{fmt::format("rank {}: died of signal 9", kVictim)});
}

INSTANTIATE_TEST_SUITE_P(Calls, LatencyMask, testing::Bool(),
                         [](const auto& test) { return test.param ? "replayed" : "eager"; });

}  // namespace
}  // namespace ferry::test
