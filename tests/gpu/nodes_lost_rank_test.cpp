/// GPU ranks on several nodes that lose one of them, or the network between them, while kernels wait. All others get a
/// typed error that names the same rank in bounded time, no kernel keeps running, and they continue without it.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <utility>

#include "gpu/survivors.hpp"
#include "node/futex.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

enum class Loss {
  kStalled,  ///< makes no further call
  kKilled,   ///< in its call, while its kernels wait for the late rank
  kCut,      ///< loses no rank, but the network between two nodes
  kSilent,   ///< as kCut, but no connection breaks: sent data vanishes
};

struct Nodes {
  int num_nodes;
  int ranks_per_node;
  int num_ranks() const { return num_nodes * ranks_per_node; }
};

struct Scenario {
  const char* name;
  Loss loss;
  Operation operation;  ///< call that is interrupted
  Nodes nodes;
  int victim = -1;                    ///< unless the network is lost
  std::pair<int, int> link = {0, 1};  ///< the nodes that lose each other, if the network is lost

  RankKind kind() const { return loss == Loss::kKilled ? RankKind::kProcesses : RankKind::kThreads; }
  bool loses_link() const { return loss == Loss::kCut || loss == Loss::kSilent; }
  /// Whether no rank learns of the loss, so that only the deadline ends the wait.
  bool ends_by_deadline() const { return loss == Loss::kStalled || loss == Loss::kSilent; }
  int node_of(int rank) const { return rank / nodes.ranks_per_node; }
  /// Rank for which the kernels of all others wait when a rank is killed or a link lost.
  int late_rank() const { return victim == 0 ? nodes.num_ranks() - 1 : 0; }
};

std::string describe(const Scenario& scenario) {
  const std::string who = scenario.loses_link()
                              ? fmt::format("nodes_{}_and_{}", scenario.link.first, scenario.link.second)
                              : fmt::format("rank_{}", scenario.victim);
  return fmt::format("{}_{}x{}_{}_{}", scenario.name, scenario.nodes.num_nodes, scenario.nodes.ranks_per_node, who,
                     kind_name(scenario.kind()));
}
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

/// Deadline where it ends the wait.
constexpr std::int64_t kShortDeadlineNs = 2 * kNsPerSecond;
/// Far longer than any wait for a rank whose end the network reports.
constexpr std::int64_t kDeadlineNs = 60 * kNsPerSecond;
constexpr std::int64_t kAtOnceNs = kNsPerSecond;

class GpuNodesLostRank : public testing::TestWithParam<Scenario> {
 protected:
  static const Scenario& scenario() { return GetParam(); }
  static unsigned num_survivors() { return static_cast<unsigned>(scenario().nodes.num_ranks() - 1); }

  static GroupOptions options() {
    GroupOptions options = gpu_group_options();
    options.ranks_per_node = scenario().nodes.ranks_per_node;
    options.transport = scenario().kind() == RankKind::kThreads ? "loopback" : "ucx";
    options.timeout_ns = scenario().ends_by_deadline() ? kShortDeadlineNs : kDeadlineNs;
    return options;
  }

  /// Makes the call, and informs the other ranks as soon as its kernels run.
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

  /// Makes the call that fails.
  Status interrupted_call(RankContext& context, Group& group) {
    const Routing routing = run_up_to(context, group, prepared_, scenario().operation);
    if (scenario().loss == Loss::kStalled) {
      if (context.rank() == scenario().late_rank()) scene_->lost_ns.store(node::monotonic_ns());
      return make_call(context, group, prepared_, routing, scenario().operation);
    }
    if (context.rank() != scenario().late_rank()) return call_under_way(context, group, routing);
    // One rank is late: the kernels of all others wait for it; then one of them is killed, or a link is lost.
    await([this] { return scene_->num_under_way.load() == num_survivors(); }, "the others' calls");
    if (scenario().loss == Loss::kKilled) {
      kill_and_await(scene_->victim_process.load());
    } else {
      lose(scenario().link);
    }
    scene_->lost_ns.store(node::monotonic_ns());
    return make_call(context, group, prepared_, routing, scenario().operation);
  }

  void lose(std::pair<int, int> link) {
    if (scenario().loss == Loss::kCut) return faults_->cut(link.first, link.second);
    faults_->drop(link.first, link.second);
    faults_->drop(link.second, link.first);
  }

  /// A link has two ends. With two nodes each can only name the other; a third node may learn of either end first.
  static bool is_at_link(int peer, const RankContext& context) {
    if (peer < 0) return false;
    const int node = scenario().node_of(peer);
    if (scenario().nodes.num_nodes == 2) return node != scenario().node_of(context.rank());
    return node == scenario().link.first || node == scenario().link.second;
  }

  /// Whether this rank may have received all its data before the loss. Ranks of a third node may need no data that the
  /// link between two others still carried. Rows of a dispatch follow the headers of calls, so only those of the late
  /// rank may be missing. Its own node, where it learns of no loss, has been sent all.
  static bool may_complete(const RankContext& context) {
    const int node = scenario().node_of(context.rank());
    const int late = scenario().node_of(scenario().late_rank());
    if (scenario().loss == Loss::kSilent) return node == late;
    if (scenario().loss == Loss::kCut && scenario().operation == Operation::kDispatch) {
      return std::pair(late, node) != scenario().link && std::pair(node, late) != scenario().link;
    }
    return scenario().loss == Loss::kCut && node != scenario().link.first && node != scenario().link.second;
  }

  void expect_loss(RankContext& context, const Status& status) const {
    const std::int64_t ended_ns = node::monotonic_ns();
    await([this] { return scene_->lost_ns.load() != 0; }, "the loss");
    const std::int64_t most_ns = scenario().ends_by_deadline() ? 2 * kShortDeadlineNs : kAtOnceNs;
    const std::int64_t waited_ns = ended_ns - scene_->lost_ns.load();
    context.expect(waited_ns <= most_ns, fmt::format("ended {} ms after the loss", waited_ns / 1'000'000));
    const bool link = scenario().loses_link();
    const bool is_culprit = link ? is_at_link(status.peer(), context) : status.peer() == scenario().victim;
    context.expect(is_culprit, fmt::format("blames {}: {}", status.peer(), status.to_string()));
    const ErrorCode code = status.code();
    const bool is_right = scenario().ends_by_deadline()
                              ? code == ErrorCode::kTimeout
                              : code == ErrorCode::kTransport || (!link && code == ErrorCode::kPeerLost);
    context.expect(is_right, status.to_string());
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) {
    Status status = interrupted_call(context, *group);
    const RouteArguments arguments(context, *group, prepared_);
    const auto call = [&] { return group->route(arguments.input(), arguments.options(), stream_of(*group)).status(); };
    // Ranks that have received all may make the next call before they learn of the loss.
    constexpr int kMostCalls = 3;
    for (int i = 0; status.ok() && may_complete(context) && i < kMostCalls; ++i) status = call();
    expect_loss(context, status);
    scene_->num_told.fetch_add(1);
    const Status later = call();
    context.expect(later.code() == status.code() && later.peer() == status.peer(),
                   fmt::format("a later call returns {}", later.to_string()));
    context.expect_code(group->destroy(), status.code(), "destroy tells, and leaves");
    group.reset();
    if (scenario().loses_link()) {
      expect_gpu_copies(context);
    } else {
      go_on_without(scenario().victim, context, without_victim_, meeting_);
    }
  }

  static PreparedCase case_of(Nodes nodes) {
    ExchangeCase spec;
    spec.world = {.num_ranks = nodes.num_ranks(), .ranks_per_node = nodes.ranks_per_node, .num_topk = 4};
    spec.world.num_experts = 2 * scenario().nodes.num_ranks() + 1;
    spec.world.max_tokens = 64;
    spec.dispatches = {{.hidden = 512}};
    spec.combines = {{.hidden = 512, .weighted = true}};
    return prepare(spec);
  }

  PreparedCase prepared_ = case_of(scenario().nodes);
  PreparedCase without_victim_ = case_of({1, scenario().nodes.num_ranks() - 1});
  SharedScene* scene_ = make_shared_scene();
  Meeting meeting_ = Meeting::prepare();
  std::optional<net::LoopbackFaults> faults_;  // only if a link is lost
};

TEST_P(GpuNodesLostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  if (scenario().loses_link()) faults_.emplace();
  const bool forked = scenario().kind() == RankKind::kProcesses;
  const RankRun run{.kind = scenario().kind(), .num_ranks = scenario().nodes.num_ranks()};
  const std::vector<std::string> failures = collect_gpu_rank_failures(run, [&](RankContext& context) {
    const int first_survivor = scenario().victim == 0 ? 1 : 0;
    if (forked && context.rank() != first_survivor) close(meeting_.listen_fd);
    // With TCP the network notices at once that a process has ended.
    if (forked) setenv("UCX_TLS", "tcp", 1);
    auto group = Group::create(context.bootstrap(), options());
    if (!context.expect_ok(group.status(), "create")) return;
    if (context.rank() == scenario().victim && !scenario().loses_link()) {
      run_victim(context, **group);
    } else {
      run_survivor(context, std::move(*group));
    }
  });
  if (forked || scenario().loses_link()) close(meeting_.listen_fd);  // otherwise a survivor took it
  std::vector<std::string> expected;
  if (scenario().loss == Loss::kKilled) expected.push_back(fmt::format("rank {}: died of signal 9", scenario().victim));
  EXPECT_EQ(failures, expected);
}

/// Two nodes, in each phase, that lose the first rank of the second node or the link between them.
std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (const int ranks_per_node : {1, 2}) {
    const auto add = [&all, ranks_per_node](const char* name, Loss loss, Operation operation) {
      all.push_back({name, loss, operation, {2, ranks_per_node}, ranks_per_node});
    };
    add("stalled_in_route", Loss::kStalled, Operation::kRoute);
    add("stalled_in_dispatch", Loss::kStalled, Operation::kDispatch);
    add("stalled_in_combine", Loss::kStalled, Operation::kCombine);
    add("killed_in_route", Loss::kKilled, Operation::kRoute);
    add("killed_in_dispatch", Loss::kKilled, Operation::kDispatch);
    add("killed_in_combine", Loss::kKilled, Operation::kCombine);
    add("cut_in_route", Loss::kCut, Operation::kRoute);
    add("cut_in_dispatch", Loss::kCut, Operation::kDispatch);
    add("cut_in_combine", Loss::kCut, Operation::kCombine);
    add("silent_in_route", Loss::kSilent, Operation::kRoute);
    add("silent_in_dispatch", Loss::kSilent, Operation::kDispatch);
    add("silent_in_combine", Loss::kSilent, Operation::kCombine);
  }
  return all;
}

/// More nodes. In 3x2, rank 0 has the rail peers 2 and 4, and never exchanges a word with ranks 3 and 5.
std::vector<Scenario> scenarios_of_third_nodes() {
  constexpr Nodes k3x2 = {3, 2};
  constexpr Nodes k4x1 = {4, 1};
  std::vector<Scenario> all = {
      {"stalled_in_route", Loss::kStalled, Operation::kRoute, k3x2, 0},
      {"stalled_in_route", Loss::kStalled, Operation::kRoute, k3x2, 3},
      {"stalled_in_dispatch", Loss::kStalled, Operation::kDispatch, k3x2, 5},
      {"stalled_in_combine", Loss::kStalled, Operation::kCombine, k3x2, 1},
      {"stalled_in_combine", Loss::kStalled, Operation::kCombine, k4x1, 2},
      {"killed_in_route", Loss::kKilled, Operation::kRoute, k3x2, 3},
      {"killed_in_dispatch", Loss::kKilled, Operation::kDispatch, k3x2, 0},
      {"killed_in_combine", Loss::kKilled, Operation::kCombine, k4x1, 3},
  };
  for (const auto& [name, operation] :
       {std::pair("cut_in_route", Operation::kRoute), std::pair("cut_in_dispatch", Operation::kDispatch),
        std::pair("cut_in_combine", Operation::kCombine)}) {
    // At the late rank's node and away from it.
    all.push_back({name, Loss::kCut, operation, k3x2, -1, {0, 1}});
    all.push_back({name, Loss::kCut, operation, k3x2, -1, {1, 2}});
    all.push_back({name, Loss::kCut, operation, k4x1, -1, {1, 3}});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuNodesLostRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(ThirdNodes, GpuNodesLostRank, testing::ValuesIn(scenarios_of_third_nodes()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
