/// Kernels that wait for a lost rank end at once, however far away their deadline is. All survivors get the same error
/// in under a second, and continue without the rank.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "gpu/survivors.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
/// Survivor that loses the victim and is itself late: it makes its call after the loss.
constexpr int kLast = 0;
constexpr int kVictim = 2;
constexpr unsigned kNumSurvivors = kNumRanks - 1;
/// Far longer than any wait here may take.
constexpr std::int64_t kDeadlineNs = 60 * kNsPerSecond;
constexpr std::int64_t kAtOnceNs = kNsPerSecond;
/// Rounds after which the victim is killed, in whatever state it is then.
constexpr unsigned kRoundsBeforeKill = 20;

enum class Loss {
  kKilledBetweenCalls,
  kKilledInACall,  ///< its kernels wait for rank 0, as do those of the others
  kKilledInALoop,  ///< rows are in transit
  kLeaves,         ///< drops its group between calls and lives on
};

struct Scenario {
  std::string name;
  RankKind kind;
  Loss loss;
  Operation operation;  ///< call that is interrupted
  bool bounded = false;
  MemoryKind memory = MemoryKind::kSymmetric;
};

std::string describe(const Scenario& scenario) { return fmt::format("{}_{}", scenario.name, kind_name(scenario.kind)); }
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

PreparedCase case_of(const Scenario& scenario, int num_ranks) {
  FaultCase one{.num_ranks = num_ranks, .bounded = scenario.bounded, .memory = scenario.memory};
  if (scenario.loss == Loss::kKilledInALoop) {
    one.max_tokens = 1024;  // 14 MiB into and out of every rank: kernels of about 100 us
    one.hidden = 7168;
  }
  return prepare_fault_case(one);
}

class GpuStoppedKernels : public testing::TestWithParam<Scenario> {
 protected:
  /// Removes the victim as the scenario requires, unless it leaves by itself.
  void lose_victim() const {
    if (GetParam().loss == Loss::kLeaves) {
      await([this] { return scene_->lost_ns.load() != 0; }, "the victim leaves");
      return;
    }
    kill_and_await(scene_->victim_process.load());
    scene_->lost_ns.store(node::monotonic_ns());
  }

  void run_victim(RankContext& context, std::shared_ptr<Group> group) const {
    scene_->victim_process.store(getpid());
    if (GetParam().loss == Loss::kKilledInALoop) {
      (void)loop(context, *group);
      return;
    }
    const Routing routing = run_up_to(context, *group, prepared_, GetParam().operation);
    if (GetParam().loss == Loss::kKilledInACall) {
      (void)call_under_way(context, *group, routing);
      context.fail("the victim survived its call");
    } else if (GetParam().loss == Loss::kLeaves) {
      await([this] { return scene_->num_under_way.load() == kNumSurvivors - 1; }, "the others' calls");
      group.reset();
      scene_->lost_ns.store(node::monotonic_ns());
    }
    await([this] { return scene_->num_told.load() == kNumSurvivors; }, "the survivors' errors");
  }

  Status call_under_way(RankContext& context, Group& group, const Routing& routing) const {
    std::optional<UnderWay> under_way;
    return make_call(context, group, prepared_, routing, GetParam().operation,
                     [&] { under_way.emplace(stream_of(group), [this] { scene_->num_under_way.fetch_add(1); }); });
  }

  /// Runs whole rounds, without waits between the calls of one, until one fails.
  Status loop(RankContext& context, Group& group) const {
    const Stream stream = stream_of(group);
    const RouteArguments arguments(context, group, prepared_);
    const DispatchTensors dispatch(context, group, prepared_, 0);
    const CombineTensors combine(context, group, prepared_, 0);
    std::optional<std::thread> killer;
    if (context.rank() == kLast) {
      killer.emplace([this] {
        await([this] { return scene_->num_rounds.load() >= kRoundsBeforeKill; }, "rounds");
        lose_victim();
      });
    }
    const std::int64_t end_ns = node::monotonic_ns() + kDeadlineNs;
    Status status;
    while (status.ok() && node::monotonic_ns() < end_ns) {
      const Result<Routing> routing = group.route(arguments.input(), arguments.options(), stream);
      status = routing.status();
      if (status.ok()) status = group.dispatch(*routing, dispatch.in, dispatch.out, stream, dispatch.options);
      if (status.ok()) status = group.combine(*routing, combine.in, combine.out, stream, combine.options);
      status = finish(group, status);
      if (context.rank() == kVictim) scene_->num_rounds.fetch_add(1);
    }
    // Later than the end of the last call; the victim is lost by then.
    if (killer) killer->join();
    return status;
  }

  Status interrupted_call(RankContext& context, Group& group) const {
    if (GetParam().loss == Loss::kKilledInALoop) return loop(context, group);
    const Routing routing = run_up_to(context, group, prepared_, GetParam().operation);
    if (context.rank() != kLast) return call_under_way(context, group, routing);
    const unsigned num_others = GetParam().loss == Loss::kKilledInACall ? kNumRanks - 1 : kNumSurvivors - 1;
    await([&] { return scene_->num_under_way.load() == num_others; }, "the others' calls");
    lose_victim();
    return make_call(context, group, prepared_, routing, GetParam().operation);
  }

  void expect_same_words(RankContext& context, const Status& status) const {
    const auto rank = static_cast<std::size_t>(context.rank());
    // The name of the rank that reported the loss first may follow.
    const std::string_view text = status.message().substr(0, status.message().find(" (reported by rank"));
    std::copy_n(text.data(), std::min(text.size(), SharedScene::kTextBytes - 1), scene_->texts[rank].data());
    scene_->num_told.fetch_add(1);
    await([this] { return scene_->num_told.load() == kNumSurvivors; }, "the survivors' errors");
    const std::string first = scene_->texts[kLast].data();
    context.expect(text == first, fmt::format("says \"{}\", and rank {}: \"{}\"", text, kLast, first));
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) const {
    const Status status = interrupted_call(context, *group);
    const std::int64_t ended_ns = node::monotonic_ns();
    await([this] { return scene_->lost_ns.load() != 0; }, "the loss of the victim");
    const std::int64_t waited_ns = ended_ns - scene_->lost_ns.load();
    context.expect(waited_ns < kAtOnceNs, fmt::format("ended {} ms after the loss", waited_ns / 1'000'000));
    context.expect_code(status, ErrorCode::kPeerLost, "the interrupted call");
    context.expect(status.peer() == kVictim, fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
    const std::string loss =
        fmt::format("rank {} has {}", kVictim, GetParam().loss == Loss::kLeaves ? "destroyed its group" : "died");
    context.expect(status.message().find(loss) != std::string_view::npos,
                   fmt::format("the message names \"{}\"", loss));
    expect_same_words(context, status);

    const RouteArguments arguments(context, *group, prepared_);
    const Status later = group->route(arguments.input(), arguments.options(), stream_of(*group)).status();
    context.expect(later.code() == status.code() && later.peer() == status.peer(),
                   fmt::format("a later call returns {}", later.to_string()));
    context.expect_code(group->destroy(), ErrorCode::kPeerLost, "destroy tells, and leaves");
    group.reset();
    go_on_without(kVictim, context, without_victim_, meeting_);
  }

  PreparedCase prepared_ = case_of(GetParam(), kNumRanks);
  PreparedCase without_victim_ = case_of(GetParam(), kNumRanks - 1);
  SharedScene* scene_ = make_shared_scene();
  Meeting meeting_ = Meeting::prepare();
};

TEST_P(GpuStoppedKernels, EndAtOnceWithTheSameErrorOnAllSurvivors) {
  const bool forked = GetParam().kind == RankKind::kProcesses;
  const std::vector<std::string> failures =
      collect_gpu_rank_failures({.kind = GetParam().kind, .num_ranks = kNumRanks}, [&](RankContext& context) {
        if (forked && context.rank() != 0) close(meeting_.listen_fd);
        GroupOptions options = gpu_group_options();
        options.timeout_ns = kDeadlineNs;
        auto group = Group::create(context.bootstrap(), options);
        if (!context.expect_ok(group.status(), "create")) return;
        if (context.rank() == kVictim) {
          run_victim(context, std::move(*group));
        } else {
          run_survivor(context, std::move(*group));
        }
      });
  if (forked) close(meeting_.listen_fd);  // with threads, rank 0 took it
  std::vector<std::string> expected;
  if (GetParam().loss != Loss::kLeaves) expected.push_back(fmt::format("rank {}: died of signal 9", kVictim));
  EXPECT_EQ(failures, expected);
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  constexpr RankKind kProcesses = RankKind::kProcesses;
  for (const auto& [loss, name] :
       {std::pair(Loss::kKilledBetweenCalls, "between"), std::pair(Loss::kKilledInACall, "in")}) {
    const auto add = [&all, loss = loss, name = name](std::string_view call, Operation operation, bool bounded,
                                                      MemoryKind memory) {
      all.push_back({fmt::format("killed_{}_{}", name, call), kProcesses, loss, operation, bounded, memory});
    };
    add("route", Operation::kRoute, false, MemoryKind::kSymmetric);
    add("bounded_route", Operation::kRoute, true, MemoryKind::kSymmetric);
    add("dispatch", Operation::kDispatch, false, MemoryKind::kSymmetric);
    add("plain_dispatch", Operation::kDispatch, true, MemoryKind::kPlain);
    add("combine", Operation::kCombine, false, MemoryKind::kSymmetric);
    add("plain_combine", Operation::kCombine, false, MemoryKind::kPlain);
  }
  for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    const char* name = memory == MemoryKind::kPlain ? "killed_in_plain_loop" : "killed_in_loop";
    all.push_back({name, kProcesses, Loss::kKilledInALoop, Operation::kDispatch, true, memory});
  }
  for (RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    all.push_back({"left_before_route", kind, Loss::kLeaves, Operation::kRoute});
    all.push_back({"left_before_dispatch", kind, Loss::kLeaves, Operation::kDispatch, true});
    all.push_back({"left_before_combine", kind, Loss::kLeaves, Operation::kCombine});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuStoppedKernels, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
