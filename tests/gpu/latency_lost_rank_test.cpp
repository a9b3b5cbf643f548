/// A rank that is lost or stalls in latency mode: the kernels of the others end in whichever half they wait for it,
/// eager or in a graph, their hosts learn which rank it was, and they go on without it.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <optional>

#include "gpu/latency_group.hpp"
#include "gpu/survivors.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kVictim = 2;
constexpr unsigned kNumSurvivors = kNumRanks - 1;
/// Of groups whose rank stalls; and of those whose rank is lost, far longer than any wait there may take.
constexpr std::int64_t kSoonNs = 2 * kNsPerSecond;
constexpr std::int64_t kFarNs = 60 * kNsPerSecond;

enum class Loss {
  kStalls,
  kKilled,
  kLeaves,  ///< drops its group and lives on
};

/// The half of a call in which the survivors wait for the victim.
enum class Half {
  kDispatchReceive,
  kCombineReceive,
  kDispatchSend,  ///< for room: the victim has received none of the calls before
  kCombineSend,   ///< for weights that only the combine was given
};

struct Scenario {
  std::string name;
  RankKind kind;
  Loss loss;
  Half half;
  bool captured = false;
  bool split = false;
};

std::string describe(const Scenario& scenario) { return fmt::format("{}_{}", scenario.name, kind_name(scenario.kind)); }
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

std::vector<PreparedCase> cases_of(Half half) {
  std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, 1);
  if (half != Half::kCombineSend) return cases;
  ExchangeCase spec = cases.front().spec;
  spec.combines = {{.hidden = 1040, .weighted = true, .order = CombineOrder::kRankSums, .own_weights = true}};
  return {prepare(spec)};
}

class GpuLatencyLostRank : public testing::TestWithParam<Scenario> {
 protected:
  using Tensors = LatencyDispatchTensors;

  std::int64_t timeout_ns() const { return GetParam().loss == Loss::kStalls ? kSoonNs : kFarNs; }
  ErrorCode expected_code() const {
    return GetParam().loss == Loss::kStalls ? ErrorCode::kTimeout : ErrorCode::kPeerLost;
  }

  /// The end of the victim's part; it returns when the survivors know.
  void be_lost(std::shared_ptr<Group>& group) const {
    if (GetParam().loss == Loss::kKilled) (void)raise(SIGKILL);
    if (GetParam().loss == Loss::kLeaves) group.reset();
    await([this] { return scene_->num_told.load() == kNumSurvivors; }, "the survivors' errors");
  }

  Status send(Group& group, Tensors& tensors, Routing& routing) const {
    tensors.options.split = true;
    Result<Routing> sent = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
    if (sent.ok()) routing = *sent;
    return finish(group, sent.status());
  }

  /// As many dispatches as the victim has room for, and one more.
  Status wait_for_room(RankContext& context, std::shared_ptr<Group>& group) const {
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
    if (context.rank() == kVictim) {
      be_lost(group);
      return {};
    }
    for (std::size_t i = 0; i < kMaxLatencyCallsInFlight; ++i) {
      const Status status = finish(*group, group->latency_receive(routings[i], stream_of(*group)));
      // Calls that all have sent are received, unless the loss is known before.
      if (!status.ok()) return status;
    }
    Status status;
    for (std::size_t i = kMaxLatencyCallsInFlight; i < kCalls && status.ok(); ++i) {
      status = send(*group, tensors[i], routings[i]);
    }
    return status;
  }

  /// A dispatch and a combine that all make, then the calls that the victim does not make.
  Status wait_for_call(RankContext& context, std::shared_ptr<Group>& group) const {
    const OwnedStream stream;
    const PreparedCase& one = cases_.front();
    Tensors dispatch(context, *group, one, 0);
    LatencyCombineTensors combine(context, *group, one, 0);
    dispatch.options.split = combine.options.split = GetParam().split;
    Routing routing;
    const auto send_dispatch = [&] {
      Result<Routing> sent = group->latency_dispatch(dispatch.in, dispatch.out, dispatch.options, stream.get());
      if (sent.ok()) routing = *sent;
      if (!sent.ok() || !GetParam().split) return sent.status();
      return group->latency_receive(routing, stream.get());
    };
    const auto send_combine = [&] {
      const Status sent = group->latency_combine(routing, combine.in, combine.out, stream.get(), combine.options);
      return sent.ok() && GetParam().split ? group->latency_receive(routing, stream.get()) : sent;
    };
    std::optional<CapturedGraph> dispatch_graph;
    std::optional<CapturedGraph> combine_graph;
    if (GetParam().captured) {
      capture(context, dispatch_graph.emplace(), stream.get(), send_dispatch);
      capture(context, combine_graph.emplace(), stream.get(), send_combine);
    }
    const auto make = [&](std::optional<CapturedGraph>& graph, const std::function<Status()>& call) {
      if (graph) graph->launch();
      return finish(*group, graph ? Status() : call(), stream.get());
    };
    meet(context);
    context.expect_ok(make(dispatch_graph, send_dispatch), "the first dispatch");
    context.expect_ok(make(combine_graph, send_combine), "the first combine");
    const bool in_combine = GetParam().half != Half::kDispatchReceive;
    if (in_combine) context.expect_ok(make(dispatch_graph, send_dispatch), "the second dispatch");
    meet(context);
    Status status;
    if (context.rank() == kVictim) {
      be_lost(group);
    } else {
      status = in_combine ? make(combine_graph, send_combine) : make(dispatch_graph, send_dispatch);
    }
    return status;
  }

  static void capture(RankContext& context, CapturedGraph& graph, Stream stream, const std::function<Status()>& call) {
    meet(context);
    graph.begin(stream);
    const Status status = call();
    graph.end();
    context.expect_ok(status, "capturing");
    graph.prepare();
  }

  void run_rank(RankContext& context, std::shared_ptr<Group> group) const {
    const std::int64_t begin_ns = node::monotonic_ns();
    const bool for_room = GetParam().half == Half::kDispatchSend;
    const Status status = for_room ? wait_for_room(context, group) : wait_for_call(context, group);
    if (context.rank() == kVictim) return;
    const std::int64_t took_ns = node::monotonic_ns() - begin_ns;
    context.expect_code(status, expected_code(), "the interrupted call");
    context.expect(status.peer() == kVictim, fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
    context.expect(took_ns < kFarNs / 2, fmt::format("took {} ms", took_ns / 1'000'000));
    {
      Tensors tensors(context, *group, cases_.front(), 0);
      Routing routing;
      const Status later = send(*group, tensors, routing);
      context.expect(later.code() == status.code() && later.peer() == status.peer(),
                     fmt::format("a later call says {}", later.to_string()));
    }
    context.expect_code(group->destroy(), expected_code(), "destroy tells, and leaves");
    group.reset();
    scene_->num_told.fetch_add(1);
    go_on_without(kVictim, context, without_victim_, meeting_);
  }

  std::vector<PreparedCase> cases_ = cases_of(GetParam().half);
  PreparedCase without_victim_ = prepare_fault_case({.num_ranks = kNumRanks - 1});
  SharedScene* scene_ = make_shared_scene();
  Meeting meeting_ = Meeting::prepare();
};

TEST_P(GpuLatencyLostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  const bool forked = GetParam().kind == RankKind::kProcesses;
  const std::vector<std::string> failures =
      collect_gpu_rank_failures({.kind = GetParam().kind, .num_ranks = kNumRanks}, [&](RankContext& context) {
        if (forked && context.rank() != 0) close(meeting_.listen_fd);
        auto group = Group::create(context.bootstrap(), latency_group_options(cases_, timeout_ns()));
        if (context.expect_ok(group.status(), "create")) run_rank(context, std::move(*group));
      });
  if (forked) close(meeting_.listen_fd);  // in a thread rank 0 took it
  std::vector<std::string> expected;
  if (GetParam().loss == Loss::kKilled) expected.push_back(fmt::format("rank {}: died of signal 9", kVictim));
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

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLatencyLostRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
