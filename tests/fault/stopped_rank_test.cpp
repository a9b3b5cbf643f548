/// A rank is stopped (SIGSTOP) and continued later, or makes its call too late: all others name it, and no rank names
/// one that only waited. The stopped rank gets that error too, and no data that have been freed.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <latch>

#include "call/call_sync.hpp"
#include "fault/small_exchange.hpp"
#include "fault/trap_memory.hpp"
#include "launch/shared_area.hpp"
#include "node/futex.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

struct Shape {
  int num_nodes;
  int ranks_per_node;
  int victim;

  int num_ranks() const { return num_nodes * ranks_per_node; }
};

std::string name_of(const testing::TestParamInfo<Shape>& info) {
  return fmt::format("Rank{}Of{}x{}", info.param.victim, info.param.num_nodes, info.param.ranks_per_node);
}

/// State shared by the rank processes of a test.
struct Stage {
  std::atomic<pid_t> victim{0};
  std::atomic<std::int64_t> stopped_ns{0};
};

Stage* make_stage() {
  static std::vector<launch::SharedArea> areas;
  areas.push_back(launch::SharedArea::map(sizeof(Stage)).value());
  return new (areas.back().bytes().data()) Stage();
}

class StoppedRank : public testing::TestWithParam<Shape> {
 protected:
  int victim() const { return GetParam().victim; }
  /// The victim's peer in the next node. Ranks of its own node get all they need and advance one call further, where
  /// they wait for ranks that wait for the victim.
  int late_rank() const {
    const int step = GetParam().num_nodes > 1 ? GetParam().ranks_per_node : 1;
    return (victim() + step) % GetParam().num_ranks();
  }
  unsigned num_survivors() const { return static_cast<unsigned>(GetParam().num_ranks() - 1); }

  void expect_victim_named(RankContext& context, const Status& status) const {
    context.expect_code(status, ErrorCode::kTimeout, "the interrupted call");
    context.expect(status.peer() == victim(), fmt::format("blamed rank {}: {}", status.peer(), status.to_string()));
    const bool is_meant = status.message().find("gave up on this rank") != std::string_view::npos;
    context.expect(is_meant == (context.rank() == victim()),
                   fmt::format("only the victim is told that others gave up on it: {}", status.to_string()));
  }

  /// Continues the victim once all others have their errors, and waits until it has its own. All ranks keep their
  /// groups until then: this test does not cover the network library's handling of lost connections.
  void let_victim_go_on(const RankContext& context) const {
    report_survivor_done(words_);
    const int first = victim() == 0 ? 1 : 0;
    if (context.rank() == first) {
      wait_for_survivors(words_, num_survivors());
      kill(stage_->victim.load(), SIGCONT);
    }
    wait_for_survivors(words_, num_survivors() + 1);
  }

  SharedWords* words_ = make_shared_words();
  Stage* stage_ = make_stage();
};

Result<std::unique_ptr<call::CallSync>> connect(RankContext& context, const Shape& shape,
                                                const char* transport = "auto") {
  BackendContext backend;
  const std::shared_ptr<Bootstrap> bootstrap = context.bootstrap();
  backend.bootstrap = bootstrap.get();
  backend.topology = {context.rank(), shape.num_ranks(), shape.ranks_per_node};
  backend.options.timeout_ns = kFaultTimeoutNs;
  backend.options.transport = transport;
  return call::CallSync::create(backend);
}

Status agree(call::CallSync& sync) {
  node::CallDescriptor descriptor;
  descriptor.record.operation = Operation::kDispatch;
  return sync.begin(descriptor);
}

using StoppedWhileItWaits = StoppedRank;

/// The hardest case: the victim's words show that it waits, like those of all others but one.
TEST_P(StoppedWhileItWaits, IsNamedByAllOthers) {
  run_ranks({RankKind::kProcesses, GetParam().num_ranks()}, [this](RankContext& context) {
    Result<std::unique_ptr<call::CallSync>> sync = connect(context, GetParam());
    if (!context.expect_ok(sync.status(), "create") || !context.expect_ok(agree(**sync), "before")) return;
    if (context.rank() == victim()) stage_->victim = getpid();
    if (context.rank() == late_rank()) {
      call::GroupState& state = (*sync)->state();
      const std::uint64_t before = state.sign_of(victim()).beats;
      while (state.sign_of(victim()).beats < before + 2) sched_yield();
      stage_->stopped_ns = node::monotonic_ns();
      kill(stage_->victim.load(), SIGSTOP);
    }
    // Data that the victim published before it was stopped may still let the others agree on this call.
    Status status;
    while (status.ok()) status = agree(**sync);
    expect_victim_named(context, status);
    if (context.rank() == victim()) {
      report_survivor_done(words_);
      return;
    }
    const std::int64_t waited_ns = node::monotonic_ns() - stage_->stopped_ns.load();
    context.expect(waited_ns <= 2 * kFaultTimeoutNs, fmt::format("took {} ms", waited_ns / 1'000'000));
    let_victim_go_on(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, StoppedWhileItWaits,
                         testing::Values(Shape{1, 4, 1}, Shape{2, 2, 0}, Shape{2, 2, 3}, Shape{2, 4, 2},
                                         Shape{4, 2, 5}),
                         name_of);

/// Without these signs of life the others would blame a rank that only waits.
TEST(WaitingRank, ShowsThatToItsNodeAndItsRail) {
  const Shape shape{2, 2, 3};
  run_ranks({RankKind::kThreads, shape.num_ranks()}, [&shape](RankContext& context) {
    Result<std::unique_ptr<call::CallSync>> sync = connect(context, shape, "loopback");
    if (!context.expect_ok(sync.status(), "create") || !context.expect_ok(agree(**sync), "before")) return;
    if (context.rank() == shape.victim) {
      for (const int other : {shape.victim - 1, shape.victim - shape.ranks_per_node}) {
        const call::Sign before = (*sync)->state().sign_of(other);
        const std::int64_t deadline_ns = node::monotonic_ns() + kFaultTimeoutNs;
        while ((*sync)->state().sign_of(other).beats < before.beats + 2 && node::monotonic_ns() < deadline_ns) {
          sched_yield();
        }
        context.expect((*sync)->state().sign_of(other).beats >= before.beats + 2, fmt::format("rank {} beats", other));
      }
    }
    context.expect_ok(agree(**sync), "the call that one rank joins late");
  });
}

using StoppedInCombine = StoppedRank;

/// The victim is stopped while it sums rows of other ranks, which free those rows after they gave up. All others have
/// done their parts by then, so nothing keeps the victim from finishing the call.
TEST_P(StoppedInCombine, GetsTheErrorAndNoSumOfFreedRows) {
  run_ranks({RankKind::kProcesses, GetParam().num_ranks()}, [this](RankContext& context) {
    GroupOptions options{.backend = "cpu", .ranks_per_node = GetParam().ranks_per_node};
    options.timeout_ns = kFaultTimeoutNs;
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    Status status;
    {
      SmallExchange exchange(**group, true);
      status = exchange.route();
      if (status.ok()) status = exchange.dispatch();
      if (!context.expect_ok(status, "before")) return;
      if (context.rank() == victim()) {
        stage_->victim = getpid();
        const auto bias_bytes = static_cast<std::size_t>(SmallExchange::kNumTokens * SmallExchange::kRowBytes);
        exchange.bias = ConstTensorView(make_trap_memory(bias_bytes, Fate::kStopped, words_, num_survivors()),
                                        DType::kBfloat16, {SmallExchange::kNumTokens, SmallExchange::kHidden});
      }
      status = exchange.combine();
      // A rank of another node may have received all it needs: its next call returns the error.
      if (status.ok() && context.rank() != victim()) status = exchange.route();
    }
    expect_victim_named(context, status);
    if (context.rank() == victim()) {
      report_survivor_done(words_);
      return;
    }
    let_victim_go_on(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, StoppedInCombine, testing::Values(Shape{1, 3, 1}, Shape{2, 2, 2}), name_of);

using AbsentRank = StoppedRank;

/// Uses a network shared by threads only, so that sanitizers see how the verdict travels.
TEST_P(AbsentRank, IsNamedByAllOthersAndByItself) {
  std::latch others_done(num_survivors());
  run_ranks({RankKind::kThreads, GetParam().num_ranks()}, [&](RankContext& context) {
    GroupOptions options{.backend = "cpu", .ranks_per_node = GetParam().ranks_per_node, .transport = "loopback"};
    options.timeout_ns = kFaultTimeoutNs;
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    SmallExchange exchange(**group, false);
    Status status = exchange.run_and_verify();
    context.expect_ok(status, "before");
    if (context.rank() == victim()) others_done.wait();
    const std::int64_t begin_ns = node::monotonic_ns();
    if (status.ok()) status = exchange.route();
    const std::int64_t waited_ns = node::monotonic_ns() - begin_ns;
    if (context.rank() != victim()) others_done.count_down();
    expect_victim_named(context, status);
    context.expect(waited_ns <= 2 * kFaultTimeoutNs, fmt::format("took {} ms", waited_ns / 1'000'000));
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, AbsentRank,
                         testing::Values(Shape{2, 2, 0}, Shape{2, 2, 3}, Shape{2, 4, 5}, Shape{4, 2, 1},
                                         Shape{3, 1, 1}),
                         name_of);

using LateRank = StoppedRank;

/// The late rank gets the timeout, not the error for differing calls, which leaves a group usable.
TEST_P(LateRank, ThatMakesAnotherCallGetsTheErrorOfTheOthers) {
  std::latch others_done(num_survivors());
  std::latch all_done(GetParam().num_ranks());
  run_ranks({RankKind::kThreads, GetParam().num_ranks()}, [&](RankContext& context) {
    GroupOptions options{.backend = "cpu", .ranks_per_node = GetParam().ranks_per_node, .transport = "loopback"};
    options.timeout_ns = kFaultTimeoutNs;
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
    const bool late = context.rank() == victim();
    if (!context.expect_ok(group.status(), "create")) {
      if (!late) others_done.count_down();
      all_done.count_down();
      return;
    }
    const std::int64_t id = 0;
    const auto route = [&](std::int64_t num_experts) {
      return (*group)->route({ConstTensorView(&id, DType::kInt64, {1, 1})}, {.num_experts = num_experts}).status();
    };
    context.expect_ok(route(4), "before");
    if (late) others_done.wait();
    const Status status = route(late ? 8 : 4);
    if (!late) others_done.count_down();
    expect_victim_named(context, status);
    all_done.arrive_and_wait();  // groups stay until the victim has its error
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, LateRank, testing::Values(Shape{1, 3, 1}, Shape{2, 2, 2}), name_of);

}  // namespace
}  // namespace ferry::test
