/// A rank that is lost or stalls in latency mode, on one node or several. The kernels of the other ranks end in
/// whichever half they wait for it, eager or in a graph; their hosts learn which rank it was; and they continue without
/// it.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <optional>
#include <tuple>
#include <utility>

#include "gpu/latency_group.hpp"
#include "gpu/survivors.hpp"
#include "node/futex.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

/// Timeout of groups whose rank stalls, and of groups whose rank is lost: far longer than any wait there may take.
constexpr std::int64_t kSoonNs = 2 * kNsPerSecond;
constexpr std::int64_t kFarNs = 60 * kNsPerSecond;

enum class Loss {
  kStalls,
  kKilled,
  kLeaves,  ///< drops its group and lives on
  kCut,     ///< loses no rank, but the network between the two nodes
};

/// Half of a call in which the survivors wait for the victim.
enum class Half {
  kDispatchReceive,
  kCombineReceive,
  kDispatchSend,  ///< for room: the victim has received none of the previous calls
  kCombineSend,   ///< for weights that only the combine received
};

struct Scenario {
  std::string name;
  RankKind kind;
  Loss loss;
  Half half;
  bool captured = false;  ///< with `split`: each half in a separate graph
  bool split = false;
  int num_ranks = 4;
  int ranks_per_node = 0;  ///< 0: all
  int victim = 2;
  std::pair<int, int> link = {0, 1};  ///< the nodes that lose each other, for kCut

  bool over_nodes() const { return ranks_per_node != 0; }
  int num_nodes() const { return over_nodes() ? num_ranks / ranks_per_node : 1; }
  unsigned num_survivors() const { return static_cast<unsigned>(num_ranks - 1); }
};

std::string describe(const Scenario& scenario) {
  const std::string nodes =
      scenario.over_nodes() ? fmt::format("_{}x{}", scenario.num_nodes(), scenario.ranks_per_node) : "";
  return fmt::format("{}{}_{}", scenario.name, nodes, kind_name(scenario.kind));
}
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

std::vector<PreparedCase> cases_of(const Scenario& scenario) {
  std::vector<PreparedCase> cases =
      latency_cases_of_equal_shapes(scenario.num_ranks, 1, false, scenario.ranks_per_node);
  if (scenario.half != Half::kCombineSend) return cases;
  ExchangeCase spec = cases.front().spec;
  spec.combines = {{.hidden = 1040, .weighted = true, .order = CombineOrder::kRankSums, .own_weights = true}};
  return {prepare(spec)};
}

class GpuLatencyLostRank : public testing::TestWithParam<Scenario> {
 protected:
  using Tensors = LatencyDispatchTensors;

  std::int64_t timeout_ns() const { return GetParam().loss == Loss::kStalls ? kSoonNs : kFarNs; }
  GroupOptions options() const {
    GroupOptions options = latency_group_options(cases_, timeout_ns());
    if (!GetParam().over_nodes()) return options;
    options.ranks_per_node = GetParam().ranks_per_node;
    options.transport = GetParam().kind == RankKind::kThreads ? "loopback" : "ucx";
    return options;
  }
  /// The network may be the first to notice that a rank is lost.
  bool is_expected(ErrorCode code) const {
    if (GetParam().loss == Loss::kStalls) return code == ErrorCode::kTimeout;
    if (GetParam().loss != Loss::kCut && code == ErrorCode::kPeerLost) return true;
    return GetParam().over_nodes() && code == ErrorCode::kTransport;
  }
  /// A link has two ends. With two nodes each can only name the other; a third node may learn of either end first.
  bool is_culprit(int rank, const RankContext& context) const {
    if (GetParam().loss != Loss::kCut) return rank == GetParam().victim;
    if (rank < 0) return false;
    const int node = rank / GetParam().ranks_per_node;
    if (GetParam().num_nodes() == 2) return node != context.rank() / GetParam().ranks_per_node;
    return node == GetParam().link.first || node == GetParam().link.second;
  }

  /// Whether all that this rank waits for may have come before its link was cut, so that its call is complete. Only
  /// rank 0 begins its call afterwards.
  bool may_be_complete(const RankContext& context) const {
    if (GetParam().loss != Loss::kCut) return false;
    const int node = context.rank() / GetParam().ranks_per_node;
    const auto [first, second] = GetParam().link;
    return !(first == 0 && node == second) && !(second == 0 && node == first);
  }
  Status next_call(RankContext& context, Group& group) const {
    Tensors tensors(context, group, cases_.front(), 0);
    Routing routing;
    const Status status = send(group, tensors, routing);
    return status.ok() ? finish(group, group.latency_receive(routing, stream_of(group))) : status;
  }

  /// Ends the victim's part; returns after the survivors have their errors.
  void be_lost(std::shared_ptr<Group>& group) const {
    if (GetParam().loss == Loss::kKilled) (void)raise(SIGKILL);
    if (GetParam().loss == Loss::kLeaves) group.reset();
    await([this] { return scene_->num_told.load() == GetParam().num_survivors(); }, "the survivors' errors");
  }

  Status send(Group& group, Tensors& tensors, Routing& routing) const {
    tensors.options.split = true;
    Result<Routing> sent = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
    if (sent.ok()) routing = *sent;
    return finish(group, sent.status());
  }

  /// Makes as many dispatches as the victim has room for, and one more. `began_ns`: time of the calls that fail.
  Status wait_for_room(RankContext& context, std::shared_ptr<Group>& group, std::int64_t& began_ns) const {
    constexpr std::size_t kCalls = kMaxLatencyCallsInFlight + 2;
    const PreparedCase& one = cases_.front();
    std::vector<Tensors> tensors;
    tensors.reserve(kCalls);
    std::array<Routing, kCalls> routings;
    for (std::size_t i = 0; i < kCalls; ++i) tensors.emplace_back(context, *group, one, 0);
    for (std::size_t i = 0; i < kMaxLatencyCallsInFlight; ++i) {
      context.expect_ok(send(*group, tensors[i], routings[i]), "send half");
    }
    meet(context);
    if (context.rank() == GetParam().victim) {
      be_lost(group);
      return {};
    }
    began_ns = node::monotonic_ns();
    for (std::size_t i = 0; i < kMaxLatencyCallsInFlight; ++i) {
      const Status status = finish(*group, group->latency_receive(routings[i], stream_of(*group)));
      // Calls that all ranks have sent are received, unless the loss is already known.
      if (!status.ok()) return status;
    }
    Status status;
    for (std::size_t i = kMaxLatencyCallsInFlight; i < kCalls && status.ok(); ++i) {
      status = send(*group, tensors[i], routings[i]);
    }
    return status;
  }

  /// Makes a dispatch and a combine with all ranks, then the calls that the victim does not make.
  Status wait_for_call(RankContext& context, std::shared_ptr<Group>& group, std::int64_t& began_ns) {
    const RankStream stream(context);
    const PreparedCase& one = cases_.front();
    Tensors dispatch(context, *group, one, 0);
    LatencyCombineTensors combine(context, *group, one, 0);
    dispatch.options.split = combine.options.split = GetParam().split;
    Routing routing;
    const auto send_dispatch = [&] {
      Result<Routing> sent = group->latency_dispatch(dispatch.in, dispatch.out, dispatch.options, stream.get());
      if (sent.ok()) routing = *sent;
      return sent.status();
    };
    const auto send_combine = [&] {
      return group->latency_combine(routing, combine.in, combine.out, stream.get(), combine.options);
    };
    const auto receive = [&] { return group->latency_receive(routing, stream.get()); };
    // One graph for each half, or one for the call.
    std::vector<CapturedGraph> dispatch_graphs;
    std::vector<CapturedGraph> combine_graphs;
    if (GetParam().captured) {
      dispatch_graphs = capture_halves(context, stream.get(), send_dispatch, receive);
      combine_graphs = capture_halves(context, stream.get(), send_combine, receive);
    }
    const auto make = [&](std::vector<CapturedGraph>& graphs, const std::function<Status()>& call) {
      Status status;
      for (CapturedGraph& graph : graphs) graph.launch();
      if (graphs.empty()) {
        status = call();
        if (status.ok() && GetParam().split) status = receive();
      }
      return finish(*group, status, stream.get());
    };
    meet(context);
    context.expect_ok(make(dispatch_graphs, send_dispatch), "the first dispatch");
    context.expect_ok(make(combine_graphs, send_combine), "the first combine");
    const bool in_combine = GetParam().half != Half::kDispatchReceive;
    if (in_combine) context.expect_ok(make(dispatch_graphs, send_dispatch), "the second dispatch");
    meet(context);
    const bool cut = GetParam().loss == Loss::kCut;
    std::optional<UnderWay> under_way;
    if (cut && context.rank() != 0) {
      under_way.emplace(stream.get(), [this] { scene_->num_under_way.fetch_add(1); });
    } else if (cut) {
      await([this] { return scene_->num_under_way.load() == GetParam().num_survivors(); }, "the others' calls");
      faults_->cut_nodes(GetParam().link.first, GetParam().link.second, GetParam().num_nodes(),
                         GetParam().ranks_per_node);
    }
    began_ns = node::monotonic_ns();
    Status status;
    if (context.rank() == GetParam().victim && !cut) {
      be_lost(group);
    } else {
      status = in_combine ? make(combine_graphs, send_combine) : make(dispatch_graphs, send_dispatch);
    }
    return status;
  }

  std::vector<CapturedGraph> capture_halves(RankContext& context, Stream stream, const std::function<Status()>& send,
                                            const std::function<Status()>& receive) const {
    std::vector<CapturedGraph> graphs(GetParam().split ? 2 : 1);
    capture(context, graphs.front(), stream, send);
    if (GetParam().split) capture(context, graphs.back(), stream, receive);
    return graphs;
  }

  static void capture(RankContext& context, CapturedGraph& graph, Stream stream, const std::function<Status()>& call) {
    meet(context);
    graph.begin(stream);
    const Status status = call();
    graph.end();
    context.expect_ok(status, "capturing");
    graph.prepare();
  }

  void run_rank(RankContext& context, std::shared_ptr<Group> group) {
    std::int64_t began_ns = 0;
    const bool for_room = GetParam().half == Half::kDispatchSend;
    Status status = for_room ? wait_for_room(context, group, began_ns) : wait_for_call(context, group, began_ns);
    // Ranks at the link may make the next call too before they learn of the loss.
    constexpr int kMostCalls = 3;
    for (int i = 0; status.ok() && may_be_complete(context) && i < kMostCalls; ++i) status = next_call(context, *group);
    const bool cut = GetParam().loss == Loss::kCut;
    if (context.rank() == GetParam().victim && !cut) return;
    const std::int64_t took_ns = node::monotonic_ns() - began_ns;
    context.expect(is_expected(status.code()), "the interrupted call: " + status.to_string());
    context.expect(is_culprit(status.peer(), context),
                   fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
    // Processes may take turns on a GPU, and after the timeout still wait for their turn.
    const bool soon = GetParam().loss == Loss::kStalls && GetParam().kind == RankKind::kThreads;
    const std::int64_t most_ns = soon ? 2 * kSoonNs : kFarNs / 2;
    context.expect(took_ns <= most_ns, fmt::format("took {} ms", took_ns / 1'000'000));
    {
      Tensors tensors(context, *group, cases_.front(), 0);
      Routing routing;
      const Status later = send(*group, tensors, routing);
      context.expect(later.code() == status.code() && later.peer() == status.peer(),
                     fmt::format("a later call returns {}", later.to_string()));
    }
    context.expect_code(group->destroy(), status.code(), "destroy tells, and leaves");
    group.reset();
    scene_->num_told.fetch_add(1);
    if (cut) {
      expect_gpu_copies(context);
      return;
    }
    go_on_without(GetParam().victim, context, without_victim_, meeting_);
  }

  std::vector<PreparedCase> cases_ = cases_of(GetParam());
  PreparedCase without_victim_ = prepare_fault_case({.num_ranks = GetParam().num_ranks - 1});
  SharedScene* scene_ = make_shared_scene();
  Meeting meeting_ = Meeting::prepare();
  std::optional<net::LoopbackFaults> faults_;  // only for kCut
};

TEST_P(GpuLatencyLostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  const bool forked = GetParam().kind == RankKind::kProcesses;
  if (GetParam().loss == Loss::kCut) faults_.emplace();
  const RankRun run{.kind = GetParam().kind, .num_ranks = GetParam().num_ranks};
  const std::vector<std::string> failures = collect_gpu_rank_failures(run, [&](RankContext& context) {
    const int first_survivor = GetParam().victim == 0 ? 1 : 0;
    if (forked && context.rank() != first_survivor) close(meeting_.listen_fd);
    // With TCP the network notices at once that a process has ended.
    if (forked) setenv("UCX_TLS", "tcp", 1);
    auto group = Group::create(context.bootstrap(), options());
    if (context.expect_ok(group.status(), "create")) run_rank(context, std::move(*group));
  });
  if (forked || GetParam().loss == Loss::kCut) close(meeting_.listen_fd);  // otherwise a survivor took it
  std::vector<std::string> expected;
  if (GetParam().loss == Loss::kKilled) {
    expected.push_back(fmt::format("rank {}: died of signal 9", GetParam().victim));
  }
  EXPECT_EQ(failures, expected);
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  const auto add_halves = [&all](const std::string& loss_name, RankKind kind, Loss loss) {
    for (const auto& [half, name] :
         {std::pair(Half::kDispatchReceive, "dispatch"), std::pair(Half::kCombineReceive, "combine")}) {
      all.push_back({fmt::format("{}_in_{}", loss_name, name), kind, loss, half});
      all.push_back({fmt::format("{}_in_split_{}", loss_name, name), kind, loss, half, false, true});
      all.push_back({fmt::format("{}_in_{}_of_a_graph", loss_name, name), kind, loss, half, true});
    }
    all.push_back({loss_name + "_without_room", kind, loss, Half::kDispatchSend});
    all.push_back({loss_name + "_without_weights", kind, loss, Half::kCombineSend});
  };
  add_halves("stalled", RankKind::kThreads, Loss::kStalls);
  add_halves("left", RankKind::kThreads, Loss::kLeaves);
  add_halves("stalled", RankKind::kProcesses, Loss::kStalls);
  add_halves("killed", RankKind::kProcesses, Loss::kKilled);
  return all;
}

/// Two nodes that lose the first rank of the second node, or the links between them.
std::vector<Scenario> scenarios_over_nodes() {
  std::vector<Scenario> all;
  const auto add = [&all](const std::string& loss_name, RankKind kind, Loss loss, int ranks_per_node) {
    for (const auto& [half, half_name] :
         {std::pair(Half::kDispatchReceive, "dispatch"), std::pair(Half::kCombineReceive, "combine")}) {
      for (const auto& [captured, split, how] :
           {std::tuple(false, false, ""), std::tuple(false, true, "_split"), std::tuple(true, false, "_captured"),
            std::tuple(true, true, "_captured_split")}) {
        all.push_back({fmt::format("{}_in{}_{}", loss_name, how, half_name), kind, loss, half, captured, split,
                       2 * ranks_per_node, ranks_per_node, ranks_per_node});
      }
    }
  };
  for (const int ranks_per_node : {1, 2}) {
    add("stalled", RankKind::kThreads, Loss::kStalls, ranks_per_node);
    add("left", RankKind::kThreads, Loss::kLeaves, ranks_per_node);
    add("killed", RankKind::kProcesses, Loss::kKilled, ranks_per_node);
    add("cut", RankKind::kThreads, Loss::kCut, ranks_per_node);
  }
  return all;
}

/// More nodes: in 3x2, ranks 3 and 5 are not on the rail of rank 0.
std::vector<Scenario> scenarios_of_third_nodes() {
  constexpr RankKind kThreads = RankKind::kThreads;
  constexpr Half kDispatch = Half::kDispatchReceive;
  constexpr Half kCombine = Half::kCombineReceive;
  return {
      {"rank_0_stalled_in_dispatch", kThreads, Loss::kStalls, kDispatch, false, false, 6, 2, 0},
      {"rank_3_stalled_in_split_combine", kThreads, Loss::kStalls, kCombine, false, true, 6, 2, 3},
      {"rank_2_stalled_in_combine", kThreads, Loss::kStalls, kCombine, false, false, 4, 1, 2},
      {"rank_5_left_in_split_dispatch", kThreads, Loss::kLeaves, kDispatch, false, true, 6, 2, 5},
      {"rank_1_left_in_captured_combine", kThreads, Loss::kLeaves, kCombine, true, false, 6, 2, 1},
      {"rank_3_killed_in_dispatch", RankKind::kProcesses, Loss::kKilled, kDispatch, false, false, 6, 2, 3},
      {"rank_0_killed_in_split_combine", RankKind::kProcesses, Loss::kKilled, kCombine, false, true, 4, 1, 0},
      {"nodes_1_and_2_cut_in_dispatch", kThreads, Loss::kCut, kDispatch, false, false, 6, 2, -1, {1, 2}},
      {"nodes_0_and_1_cut_in_split_combine", kThreads, Loss::kCut, kCombine, false, true, 6, 2, -1, {0, 1}},
      {"nodes_1_and_3_cut_in_captured_dispatch", kThreads, Loss::kCut, kDispatch, true, false, 4, 1, -1, {1, 3}},
  };
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLatencyLostRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Nodes, GpuLatencyLostRank, testing::ValuesIn(scenarios_over_nodes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(ThirdNodes, GpuLatencyLostRank, testing::ValuesIn(scenarios_of_third_nodes()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
