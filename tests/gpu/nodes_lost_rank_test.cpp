/// GPU ranks on several nodes that lose one of them, or the network between them, while kernels wait: all others get a
/// typed error that names the same rank in bounded time, no kernel stays behind, and they go on without it.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>

#include "gpu/survivors.hpp"
#include "net/loopback/faults.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

enum class Loss {
  kStalled,  ///< makes no further call
  kKilled,   ///< in its call, while its kernels wait for rank 0
  kCut,      ///< the network between the two nodes
};

struct Scenario {
  const char* name;
  Loss loss;
  RankKind kind;
  Operation operation;  ///< that is interrupted
  int ranks_per_node = 1;
  int num_ranks() const { return 2 * ranks_per_node; }
  /// The first rank of the second node; with a link that is cut each side names a rank of the other.
  int victim() const { return ranks_per_node; }
};

std::string describe(const Scenario& scenario) {
  return fmt::format("{}_2x{}_{}", scenario.name, scenario.ranks_per_node, kind_name(scenario.kind));
}
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

constexpr std::int64_t kStalledDeadlineNs = 2 * kNsPerSecond;
/// Far longer than any wait for somebody whose end the network reports.
constexpr std::int64_t kDeadlineNs = 60 * kNsPerSecond;
constexpr std::int64_t kAtOnceNs = kNsPerSecond;

class GpuNodesLostRank : public testing::TestWithParam<Scenario> {
 protected:
  static const Scenario& scenario() { return GetParam(); }
  static unsigned num_survivors() { return static_cast<unsigned>(scenario().num_ranks() - 1); }

  static GroupOptions options() {
    GroupOptions options = gpu_group_options();
    options.ranks_per_node = scenario().ranks_per_node;
    options.transport = scenario().kind == RankKind::kThreads ? "loopback" : "ucx";
    options.timeout_ns = scenario().loss == Loss::kStalled ? kStalledDeadlineNs : kDeadlineNs;
    return options;
  }

  /// Tells the others as soon as its kernels run.
  Status call_under_way(RankContext& context, Group& group, const Routing& routing) const {
    std::optional<UnderWay> under_way;
    return make_call(context, group, prepared_, routing, scenario().operation,
                     [&] { under_way.emplace(stream_of(group), [this] { scene_->num_under_way.fetch_add(1); }); });
  }

  void run_victim(RankContext& context, Group& group) const {
    scene_->victim_process.store(getpid());
    const Routing routing = run_up_to(context, group, prepared_, scenario().operation);
    if (scenario().loss == Loss::kKilled) {
      (void)call_under_way(context, group, routing);
      context.fail("the victim survived its call");
    }
    await([this] { return scene_->num_told.load() == num_survivors(); }, "the survivors' errors");
  }

  /// The call that fails.
  Status interrupted_call(RankContext& context, Group& group) {
    const Routing routing = run_up_to(context, group, prepared_, scenario().operation);
    if (scenario().loss == Loss::kStalled) {
      if (context.rank() == 0) scene_->lost_ns.store(node::monotonic_ns());
      return make_call(context, group, prepared_, routing, scenario().operation);
    }
    if (context.rank() != 0) return call_under_way(context, group, routing);
    // Rank 0 is late: the kernels of all others wait for it, and then it goes, or its link does.
    await([this] { return scene_->num_under_way.load() == num_survivors(); }, "the others' calls");
    if (scenario().loss == Loss::kKilled) {
      kill_and_await(scene_->victim_process.load());
    } else {
      faults_->cut(0, 1);
    }
    scene_->lost_ns.store(node::monotonic_ns());
    return make_call(context, group, prepared_, routing, scenario().operation);
  }

  void expect_loss(RankContext& context, const Status& status) const {
    const std::int64_t ended_ns = node::monotonic_ns();
    await([this] { return scene_->lost_ns.load() != 0; }, "the loss");
    const std::int64_t most_ns = scenario().loss == Loss::kStalled ? 2 * kStalledDeadlineNs : kAtOnceNs;
    const std::int64_t waited_ns = ended_ns - scene_->lost_ns.load();
    context.expect(waited_ns <= most_ns, fmt::format("ended {} ms after the loss", waited_ns / 1'000'000));
    const bool cut = scenario().loss == Loss::kCut;
    const int num_near = scenario().ranks_per_node;
    const bool is_culprit = cut ? status.peer() >= 0 && status.peer() / num_near != context.rank() / num_near
                                : status.peer() == scenario().victim();
    context.expect(is_culprit, fmt::format("blames {}: {}", status.peer(), status.to_string()));
    const ErrorCode code = status.code();
    const bool is_right = scenario().loss == Loss::kStalled
                              ? code == ErrorCode::kTimeout
                              : code == ErrorCode::kTransport || (!cut && code == ErrorCode::kPeerLost);
    context.expect(is_right, status.to_string());
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) {
    const Status status = interrupted_call(context, *group);
    expect_loss(context, status);
    scene_->num_told.fetch_add(1);
    const RouteArguments arguments(context, *group, prepared_);
    const Status later = group->route(arguments.input(), arguments.options(), stream_of(*group)).status();
    context.expect(later.code() == status.code() && later.peer() == status.peer(),
                   fmt::format("a later call says {}", later.to_string()));
    context.expect_code(group->destroy(), status.code(), "destroy tells, and leaves");
    group.reset();
    if (scenario().loss == Loss::kCut) {
      expect_gpu_copies(context);
    } else {
      go_on_without(scenario().victim(), context, without_victim_, meeting_);
    }
  }

  static PreparedCase case_of(int num_ranks, int ranks_per_node) {
    ExchangeCase spec;
    spec.world = {.num_ranks = num_ranks, .ranks_per_node = ranks_per_node, .num_topk = 4};
    spec.world.num_experts = 2 * scenario().num_ranks() + 1;
    spec.world.max_tokens = 64;
    spec.dispatches = {{.hidden = 512}};
    spec.combines = {{.hidden = 512, .weighted = true}};
    return prepare(spec);
  }

  PreparedCase prepared_ = case_of(scenario().num_ranks(), scenario().ranks_per_node);
  PreparedCase without_victim_ = case_of(scenario().num_ranks() - 1, scenario().num_ranks() - 1);
  SharedScene* scene_ = make_shared_scene();
  Meeting meeting_ = Meeting::prepare();
  std::optional<net::LoopbackFaults> faults_;  // only where the link is cut
};

TEST_P(GpuNodesLostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  if (scenario().loss == Loss::kCut) faults_.emplace();
  const bool forked = scenario().kind == RankKind::kProcesses;
  const RankRun run{.kind = scenario().kind, .num_ranks = scenario().num_ranks()};
  const std::vector<std::string> failures = collect_gpu_rank_failures(run, [&](RankContext& context) {
    if (forked && context.rank() != 0) close(meeting_.listen_fd);
    // Whose network notices at once that a process has ended.
    if (forked) setenv("UCX_TLS", "tcp", 1);
    auto group = Group::create(context.bootstrap(), options());
    if (!context.expect_ok(group.status(), "create")) return;
    if (context.rank() == scenario().victim() && scenario().loss != Loss::kCut) {
      run_victim(context, **group);
    } else {
      run_survivor(context, std::move(*group));
    }
  });
  if (forked || scenario().loss == Loss::kCut) close(meeting_.listen_fd);  // otherwise rank 0 took it
  std::vector<std::string> expected;
  if (scenario().loss == Loss::kKilled)
    expected.push_back(fmt::format("rank {}: died of signal 9", scenario().victim()));
  EXPECT_EQ(failures, expected);
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (const int ranks_per_node : {1, 2}) {
    const auto add = [&all, ranks_per_node](const char* name, Loss loss, RankKind kind, Operation operation) {
      all.push_back({name, loss, kind, operation, ranks_per_node});
    };
    add("stalled_in_route", Loss::kStalled, RankKind::kThreads, Operation::kRoute);
    add("stalled_in_dispatch", Loss::kStalled, RankKind::kThreads, Operation::kDispatch);
    add("stalled_in_combine", Loss::kStalled, RankKind::kThreads, Operation::kCombine);
    add("killed_in_route", Loss::kKilled, RankKind::kProcesses, Operation::kRoute);
    add("killed_in_dispatch", Loss::kKilled, RankKind::kProcesses, Operation::kDispatch);
    add("killed_in_combine", Loss::kKilled, RankKind::kProcesses, Operation::kCombine);
    add("cut_in_route", Loss::kCut, RankKind::kThreads, Operation::kRoute);
    add("cut_in_dispatch", Loss::kCut, RankKind::kThreads, Operation::kDispatch);
    add("cut_in_combine", Loss::kCut, RankKind::kThreads, Operation::kCombine);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuNodesLostRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
