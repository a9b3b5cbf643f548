/// A rank that arrives after the others have given up on it gets a typed error and does not hang; and the deadline of
/// one rank ends the waits of all.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "gpu/survivors.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kFirst = 0;
constexpr int kVictim = 2;
constexpr unsigned kNumSurvivors = kNumRanks - 1;
constexpr std::int64_t kTimeoutNs = 2 * kNsPerSecond;
constexpr std::int64_t kAtOnceNs = kNsPerSecond;

struct Scenario {
  std::string name;
  RankKind kind;
  Operation operation;  ///< call for which the victim is late
  bool bounded = false;
  bool others_left = false;  ///< the survivors have already destroyed their groups
};

std::string describe(const Scenario& scenario) { return fmt::format("{}_{}", scenario.name, kind_name(scenario.kind)); }
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

/// Runs `victim` on one rank and `survivor` on all others.
void run_with_victim(RankKind kind, std::int64_t timeout_ns,
                     const std::function<void(RankContext&, std::shared_ptr<Group>)>& survivor,
                     const std::function<void(RankContext&, std::shared_ptr<Group>)>& victim) {
  run_gpu_ranks({.kind = kind, .num_ranks = kNumRanks}, [&](RankContext& context) {
    GroupOptions options = gpu_group_options();
    options.timeout_ns = timeout_ns;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    (context.rank() == kVictim ? victim : survivor)(context, std::move(*group));
  });
}

void expect_timeout(RankContext& context, const Status& status) {
  context.expect_code(status, ErrorCode::kTimeout, "the interrupted call");
  context.expect(status.peer() == kVictim, fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
}

class GpuLateRank : public testing::TestWithParam<Scenario> {
 protected:
  /// A rank process is stopped, whatever its GPU is doing; a rank thread only makes no call.
  void be_late(RankContext& context, Group& group, const Routing& routing) const {
    if (GetParam().kind == RankKind::kProcesses) (void)raise(SIGSTOP);
    await([this] { return scene_->num_told.load() == kNumSurvivors; }, "the survivors' errors");
    const std::int64_t begin_ns = node::monotonic_ns();
    const Status status = make_call(context, group, prepared_, routing, GetParam().operation);
    const std::int64_t waited_ns = node::monotonic_ns() - begin_ns;
    expect_timeout(context, status);
    context.expect(status.message().find("gave up on this rank") != std::string_view::npos, status.to_string());
    context.expect(waited_ns < kAtOnceNs, fmt::format("took {} ms", waited_ns / 1'000'000));
  }

  void run_victim(RankContext& context, std::shared_ptr<Group> group) const {
    scene_->victim_process.store(getpid());
    const Routing routing = run_up_to(context, *group, prepared_, GetParam().operation);
    be_late(context, *group, routing);
    context.expect_code(group->destroy(), ErrorCode::kTimeout, "destroy tells, and leaves");
    group.reset();
    scene_->lost_ns.store(node::monotonic_ns());
    const Bytes bytes(1 << 20, std::byte{0x24});
    const DeviceMemory memory(bytes.size());
    copy_to_device(memory.data(), bytes.data(), bytes.size());
    context.expect(read_memory(true, memory.data(), bytes.size()) == bytes, "the GPU no longer copies");
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) const {
    const Routing routing = run_up_to(context, *group, prepared_, GetParam().operation);
    expect_timeout(context, make_call(context, *group, prepared_, routing, GetParam().operation));
    if (GetParam().others_left) {
      context.expect_code(group->destroy(), ErrorCode::kTimeout, "destroy tells, and leaves");
      group.reset();
    }
    scene_->num_told.fetch_add(1);
    if (context.rank() == kFirst && GetParam().kind == RankKind::kProcesses) {
      await([this] { return scene_->num_told.load() == kNumSurvivors; }, "the survivors' errors");
      (void)kill(scene_->victim_process.load(), SIGCONT);
    }
    await([this] { return scene_->lost_ns.load() != 0; }, "the late rank's error");
  }

  PreparedCase prepared_ = prepare_fault_case({.num_ranks = kNumRanks, .bounded = GetParam().bounded});
  SharedScene* scene_ = make_shared_scene();
};

TEST_P(GpuLateRank, GetsATypedErrorAtOnce) {
  run_with_victim(
      GetParam().kind, kTimeoutNs,
      [this](RankContext& context, std::shared_ptr<Group> group) { run_survivor(context, std::move(group)); },
      [this](RankContext& context, std::shared_ptr<Group> group) { run_victim(context, std::move(group)); });
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    all.push_back({"route", kind, Operation::kRoute});
    all.push_back({"bounded_route", kind, Operation::kRoute, true});
    all.push_back({"dispatch", kind, Operation::kDispatch});
    all.push_back({"combine", kind, Operation::kCombine});
    all.push_back({"dispatch_after_the_others_left", kind, Operation::kDispatch, false, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLateRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

class GpuDeadline : public testing::TestWithParam<RankKind> {};

/// The others begin to wait after the first has waited for three quarters of the deadline, so their own deadline would
/// end that much later.
TEST_P(GpuDeadline, OfTheFirstRankEndsTheWaitsOfAll) {
  constexpr std::int64_t kLongNs = 4 * kNsPerSecond;
  const PreparedCase prepared = prepare_fault_case({.num_ranks = kNumRanks, .bounded = true});
  SharedScene* const scene = make_shared_scene();
  const auto survivor = [&](RankContext& context, const std::shared_ptr<Group>& group) {
    const Routing routing = run_up_to(context, *group, prepared, Operation::kDispatch);
    const Status status = make_call(context, *group, prepared, routing, Operation::kDispatch, [&] {
      if (context.rank() == kFirst) {
        scene->began_ns.store(node::monotonic_ns());
        return;
      }
      await(
          [&] {
            const std::int64_t began_ns = scene->began_ns.load();
            return began_ns != 0 && node::monotonic_ns() >= began_ns + kLongNs / 4 * 3;
          },
          "the first rank's wait");
    });
    const std::int64_t waited_ns = node::monotonic_ns() - scene->began_ns.load();
    expect_timeout(context, status);
    context.expect(waited_ns < kLongNs + kAtOnceNs, fmt::format("ended after {} ms", waited_ns / 1'000'000));
    scene->num_told.fetch_add(1);
  };
  const auto victim = [&](RankContext& context, const std::shared_ptr<Group>& group) {
    (void)run_up_to(context, *group, prepared, Operation::kDispatch);
    await([&] { return scene->num_told.load() == kNumSurvivors; }, "the survivors' errors");
  };
  run_with_victim(GetParam(), kLongNs, survivor, victim);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuDeadline, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return kind_name(test.param); });

}  // namespace
}  // namespace ferry::test
