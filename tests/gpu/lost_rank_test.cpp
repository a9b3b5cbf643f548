/// A rank that stops calling: the others' kernels give up at the deadline, their hosts learn which rank it was, and
/// their GPUs remain usable by a new group.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "fault/trap_memory.hpp"
#include "gpu/survivors.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kVictim = 2;
constexpr std::int64_t kTimeoutNs = 2 * kNsPerSecond;

struct Scenario {
  const char* name;
  RankKind kind;
  Operation operation;  ///< first call that the victim does not make
  bool bounded = false;
  MemoryKind memory = MemoryKind::kSymmetric;
};

std::string describe(const Scenario& scenario) { return fmt::format("{}_{}", scenario.name, kind_name(scenario.kind)); }
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

PreparedCase case_of(const Scenario& scenario, int num_ranks) {
  return prepare_fault_case({.num_ranks = num_ranks, .bounded = scenario.bounded, .memory = scenario.memory});
}

class GpuLostRank : public testing::TestWithParam<Scenario> {
 protected:
  void run_victim(RankContext& context, Group& group) const {
    (void)run_up_to(context, group, prepared_, GetParam().operation);
    wait_for_survivors(words_, kNumRanks - 1);
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) const {
    const Routing routing = run_up_to(context, *group, prepared_, GetParam().operation);
    const std::int64_t begin_ns = node::monotonic_ns();
    const Status status = make_call(context, *group, prepared_, routing, GetParam().operation);
    const std::int64_t waited_ns = node::monotonic_ns() - begin_ns;

    context.expect_code(status, ErrorCode::kTimeout, "the interrupted call");
    context.expect(status.peer() == kVictim, fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
    context.expect(status.message().find(fmt::format("rank {}", kVictim)) != std::string_view::npos, "names the rank");
    context.expect(waited_ns <= 2 * kTimeoutNs, fmt::format("took {} ms", waited_ns / 1'000'000));

    const RouteArguments arguments(context, *group, prepared_);
    const Status later = group->route(arguments.input(), arguments.options(), stream_of(*group)).status();
    context.expect(later.code() == status.code() && later.peer() == status.peer(),
                   fmt::format("a later call returns {}", later.to_string()));
    context.expect_code(group->wait(stream_of(*group)), ErrorCode::kTimeout, "a later wait");
    context.expect_code(group->destroy(), ErrorCode::kTimeout, "destroy tells, and leaves");
    group.reset();
    go_on_without(kVictim, context, without_the_victim_, meeting_);
  }

  PreparedCase prepared_ = case_of(GetParam(), kNumRanks);
  PreparedCase without_the_victim_ = case_of(GetParam(), kNumRanks - 1);
  SharedWords* words_ = make_shared_words();
  Meeting meeting_ = Meeting::prepare();
};

TEST_P(GpuLostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  const bool forked = GetParam().kind == RankKind::kProcesses;
  const std::vector<std::string> failures =
      collect_gpu_rank_failures({.kind = GetParam().kind, .num_ranks = kNumRanks}, [&](RankContext& context) {
        if (forked && context.rank() != 0) close(meeting_.listen_fd);
        GroupOptions options = gpu_group_options();
        options.timeout_ns = kTimeoutNs;
        auto group = Group::create(context.bootstrap(), options);
        if (!context.expect_ok(group.status(), "create")) return;
        if (context.rank() == kVictim) {
          run_victim(context, **group);
        } else {
          run_survivor(context, std::move(*group));
          report_survivor_done(words_);
        }
      });
  if (forked) close(meeting_.listen_fd);  // with threads, rank 0 took it
  EXPECT_EQ(failures, std::vector<std::string>());
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    all.push_back({"stalled_in_route", kind, Operation::kRoute});
    all.push_back({"stalled_in_bounded_route", kind, Operation::kRoute, true});
    all.push_back({"stalled_in_dispatch", kind, Operation::kDispatch});
    all.push_back({"stalled_in_plain_dispatch", kind, Operation::kDispatch, true, MemoryKind::kPlain});
    all.push_back({"stalled_in_combine", kind, Operation::kCombine});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLostRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
