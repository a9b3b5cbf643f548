/// A rank that stops calling, or dies between two calls: the others' kernels give up in bounded time, their hosts learn
/// which rank it was, and their GPUs go on with a new group.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "core/agreement.hpp"
#include "fault/trap_memory.hpp"
#include "gpu/gpu_group.hpp"
#include "node/futex.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kVictim = 2;
constexpr std::int64_t kTimeoutNs = 2 * kNsPerSecond;

struct Scenario {
  const char* name;
  RankKind kind;
  Operation operation;  ///< the first call that the victim does not make
  Fate fate;
  bool bounded = false;
  MemoryKind memory = MemoryKind::kSymmetric;
};

std::string describe(const Scenario& scenario) { return fmt::format("{}_{}", scenario.name, kind_name(scenario.kind)); }
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << describe(scenario); }

PreparedCase fault_case(int num_ranks, const Scenario& scenario) {
  ExchangeCase one;
  one.name = fmt::format("{} ranks", num_ranks);
  one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 2 * num_ranks + 1, .max_tokens = 64};
  one.world.spare_recv_rows = scenario.bounded ? 3 : -1;
  one.memory = scenario.memory;
  one.dispatches = {{.hidden = 512}};
  one.combines = {{.hidden = 512, .weighted = true}};
  return prepare(one);
}

class GpuLostRank : public testing::TestWithParam<Scenario> {
 protected:
  /// The calls that every rank makes, the victim too.
  Routing run_up_to_the_fault(RankContext& context, Group& group) const {
    Routing routing;
    if (GetParam().operation != Operation::kRoute) routing = check_route(context, group, prepared_);
    if (GetParam().operation == Operation::kCombine) check_dispatch(context, group, routing, prepared_, 0);
    meet(context);
    return routing;
  }

  void run_victim(RankContext& context, Group& group) const {
    (void)run_up_to_the_fault(context, group);
    if (GetParam().fate == Fate::kKilled) (void)kill(getpid(), SIGKILL);
    wait_for_survivors(words_, kNumRanks - 1);
  }

  Status make_interrupted_call(RankContext& context, Group& group, const Routing& routing) const {
    const Stream stream = stream_of(group);
    if (GetParam().operation == Operation::kRoute) {
      const RouteArguments arguments(context, group, prepared_);
      return finish(group, group.route(arguments.input(), arguments.options(), stream).status());
    }
    if (GetParam().operation == Operation::kDispatch) {
      const DispatchTensors tensors(context, group, prepared_, 0);
      return finish(group, group.dispatch(routing, tensors.in, tensors.out, stream, tensors.options));
    }
    const CombineTensors tensors(context, group, prepared_, 0);
    return finish(group, group.combine(routing, tensors.in, tensors.out, stream, tensors.options));
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) const {
    const Routing routing = run_up_to_the_fault(context, *group);
    const std::int64_t begin_ns = node::monotonic_ns();
    const Status status = make_interrupted_call(context, *group, routing);
    const std::int64_t waited_ns = node::monotonic_ns() - begin_ns;

    const ErrorCode expected = GetParam().fate == Fate::kKilled ? ErrorCode::kPeerLost : ErrorCode::kTimeout;
    context.expect_code(status, expected, "the interrupted call");
    context.expect(status.peer() == kVictim, fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
    context.expect(status.message().find(fmt::format("rank {}", kVictim)) != std::string_view::npos, "names the rank");
    context.expect(waited_ns <= 2 * kTimeoutNs, fmt::format("took {} ms", waited_ns / 1'000'000));

    const RouteArguments arguments(context, *group, prepared_);
    const Status later = group->route(arguments.input(), arguments.options(), stream_of(*group)).status();
    context.expect(later.code() == status.code() && later.peer() == status.peer(),
                   fmt::format("a later call says {}", later.to_string()));
    context.expect_code(group->wait(stream_of(*group)), expected, "a later wait");
    context.expect_code(group->destroy(), expected, "destroy tells, and leaves");
    group.reset();

    const Bytes bytes(1 << 20, std::byte{0x42});
    const DeviceMemory memory(bytes.size());
    copy_to_device(memory.data(), bytes.data(), bytes.size());
    context.expect(read_memory(true, memory.data(), bytes.size()) == bytes, "the GPU no longer copies");
    run_without_the_victim(context);
  }

  void run_without_the_victim(RankContext& context) const {
    const int new_rank = context.rank() < kVictim ? context.rank() : context.rank() - 1;
    auto bootstrap = create_tcp_bootstrap(meeting_.options(new_rank, kNumRanks - 1));
    if (!context.expect_ok(bootstrap.status(), "the survivors' bootstrap")) return;
    RankContext survivor(new_rank, kNumRanks - 1, *bootstrap);
    auto second = Group::create(*bootstrap, gpu_group_options());
    if (!context.expect_ok(second.status(), "the survivors' group")) return;
    check_case(survivor, **second, without_the_victim_);
    for (const std::string& text : survivor.failures()) context.fail("among the survivors: " + text);
    context.expect_ok((*second)->destroy(), "the end");
  }

  PreparedCase prepared_ = fault_case(kNumRanks, GetParam());
  PreparedCase without_the_victim_ = fault_case(kNumRanks - 1, GetParam());
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
  if (forked) close(meeting_.listen_fd);  // in a thread rank 0 took it
  std::vector<std::string> expected;
  if (GetParam().fate == Fate::kKilled) expected.push_back(fmt::format("rank {}: died of signal 9", kVictim));
  EXPECT_EQ(failures, expected);
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (RankKind kind : {RankKind::kThreads, RankKind::kProcesses}) {
    all.push_back({"stalled_in_route", kind, Operation::kRoute, Fate::kStalled});
    all.push_back({"stalled_in_bounded_route", kind, Operation::kRoute, Fate::kStalled, true});
    all.push_back({"stalled_in_dispatch", kind, Operation::kDispatch, Fate::kStalled});
    all.push_back({"stalled_in_plain_dispatch", kind, Operation::kDispatch, Fate::kStalled, true, MemoryKind::kPlain});
    all.push_back({"stalled_in_combine", kind, Operation::kCombine, Fate::kStalled});
  }
  all.push_back({"killed_before_dispatch", RankKind::kProcesses, Operation::kDispatch, Fate::kKilled});
  all.push_back({"killed_before_plain_dispatch", RankKind::kProcesses, Operation::kDispatch, Fate::kKilled, true,
                 MemoryKind::kPlain});
  all.push_back({"killed_before_combine", RankKind::kProcesses, Operation::kCombine, Fate::kKilled});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLostRank, testing::ValuesIn(scenarios()),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
