/// A rank that fails in latency mode, before, between or inside the halves of a call: every other rank gets an error
/// that names it within bounded time, and can continue without the failed rank.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "fault/lost_rank.hpp"
#include "fault/small_latency_exchange.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

/// Where the victim fails in the call.
enum class Moment {
  kBeforeSending,   ///< it never makes the call
  kBetweenHalves,   ///< its send half has returned
  kWhileReceiving,  ///< in the middle of reading its own input
};

struct Scenario {
  const char* name;
  Operation operation;
  Moment moment;
  Fate fate;
  int num_ranks = 5;
  int ranks_per_node = 0;  // 0: all
};

std::string name_of(const testing::TestParamInfo<Scenario>& info) { return info.param.name; }

class LatencyLostRank : public testing::TestWithParam<Scenario> {
 protected:
  bool symmetric() const { return GetParam().moment != Moment::kWhileReceiving; }

  /// Returns unless the victim fails at this moment.
  void suffer(Moment moment, Operation operation) const {
    if (moment != GetParam().moment || operation != GetParam().operation) return;
    if (GetParam().fate == Fate::kKilled) kill(getpid(), SIGKILL);
    wait_for_survivors(run_.words(), run_.num_survivors());
    _exit(0);
  }

  /// Returns trap memory if the victim is to fail while reading in `operation`, else `memory`.
  const void* trap_or(const void* memory, Operation operation, std::size_t bytes) const {
    if (GetParam().moment != Moment::kWhileReceiving || operation != GetParam().operation) return memory;
    return make_trap_memory(bytes, GetParam().fate, run_.words(), run_.num_survivors());
  }

  void run_victim(RankContext& context, Group& group) const {
    // A second dispatch in flight, which is received first.
    SmallLatencyExchange before(group, symmetric());
    SmallLatencyExchange exchange(group, symmetric());
    exchange.x = trap_or(exchange.x, Operation::kLatencyDispatch,
                         SmallLatencyExchange::kNumTokens * SmallLatencyExchange::kRowBytes);
    context.expect_ok(before.send_dispatch(), "the dispatch before");
    suffer(Moment::kBeforeSending, Operation::kLatencyDispatch);
    context.expect_ok(exchange.send_dispatch(), "the send half of the dispatch");
    context.expect_ok(before.receive(), "the receive half of the dispatch before");
    suffer(Moment::kBetweenHalves, Operation::kLatencyDispatch);
    context.expect_ok(exchange.receive(), "the receive half of the dispatch");
    exchange.y = trap_or(exchange.y, Operation::kLatencyCombine, exchange.slab_bytes());
    suffer(Moment::kBeforeSending, Operation::kLatencyCombine);
    context.expect_ok(exchange.send_combine(), "the send half of the combine");
    suffer(Moment::kBetweenHalves, Operation::kLatencyCombine);
    (void)exchange.receive();
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) const {
    SmallLatencyExchange before(*group, symmetric());
    SmallLatencyExchange exchange(*group, symmetric());
    // A step that waits for no peer may or may not have noticed the loss yet.
    const auto sent = [&](const Status& status, const char* what) {
      if (!status.ok()) run_.expect_named(context, status, what);
      return status;
    };
    context.expect_ok(before.send_dispatch(), "the first send half");
    const std::int64_t begin_ns = node::monotonic_ns();
    Status status = sent(exchange.send_dispatch(), "the send half of the dispatch");
    const Status first = before.receive();
    if (GetParam().moment == Moment::kBeforeSending && GetParam().operation == Operation::kLatencyDispatch) {
      run_.expect_named(context, first, "a call that the victim has sent, and never received");
      status = first;
    } else if (run_.several_nodes() && !first.ok()) {
      // The victim had received all it needed, but a rank of another node may still have been receiving from it.
      status = sent(first, "the dispatch before, which the victim has received");
    } else {
      context.expect_ok(first, "the dispatch that all ranks received");
    }
    if (status.ok()) status = exchange.receive();
    if (status.ok()) status = sent(exchange.send_combine(), "the send half of the combine");
    if (status.ok()) status = exchange.receive();
    // A rank of another node may have received all it needs before the victim failed: its next call returns the error.
    if (status.ok() && run_.several_nodes()) {
      status = before.send_combine();
      if (status.ok()) status = before.receive();
    }
    run_.expect_interrupted(context, status, begin_ns);
    const Status later = SmallLatencyExchange(*group, false).send_dispatch();
    run_.go_on_without_it(context, std::move(group), later,
                          [this](Group& second) { return SmallLatencyExchange(second, symmetric()).run_and_verify(); });
  }

  const LostRankRun run_{{GetParam().fate, GetParam().operation, GetParam().num_ranks, GetParam().ranks_per_node}};
};

TEST_P(LatencyLostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  run_.run([this](RankContext& context, Group& group) { run_victim(context, group); },
           [this](RankContext& context, std::shared_ptr<Group> group) { run_survivor(context, std::move(group)); });
}

constexpr Operation kDispatch = Operation::kLatencyDispatch;
constexpr Operation kCombine = Operation::kLatencyCombine;

INSTANTIATE_TEST_SUITE_P(
    OneNode, LatencyLostRank,
    testing::Values(Scenario{"KilledBeforeDispatch", kDispatch, Moment::kBeforeSending, Fate::kKilled},
                    Scenario{"KilledBetweenDispatchHalves", kDispatch, Moment::kBetweenHalves, Fate::kKilled},
                    Scenario{"KilledReceivingDispatch", kDispatch, Moment::kWhileReceiving, Fate::kKilled},
                    Scenario{"KilledBeforeCombine", kCombine, Moment::kBeforeSending, Fate::kKilled},
                    Scenario{"KilledBetweenCombineHalves", kCombine, Moment::kBetweenHalves, Fate::kKilled},
                    Scenario{"KilledReceivingCombine", kCombine, Moment::kWhileReceiving, Fate::kKilled},
                    Scenario{"StalledBeforeDispatch", kDispatch, Moment::kBeforeSending, Fate::kStalled},
                    Scenario{"StalledBetweenDispatchHalves", kDispatch, Moment::kBetweenHalves, Fate::kStalled},
                    Scenario{"StalledReceivingDispatch", kDispatch, Moment::kWhileReceiving, Fate::kStalled},
                    Scenario{"StalledBetweenCombineHalves", kCombine, Moment::kBetweenHalves, Fate::kStalled},
                    Scenario{"StalledReceivingCombine", kCombine, Moment::kWhileReceiving, Fate::kStalled}),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    SeveralNodes, LatencyLostRank,
    testing::Values(Scenario{"KilledBetweenDispatchHalves2x3", kDispatch, Moment::kBetweenHalves, Fate::kKilled, 6, 3},
                    Scenario{"KilledReceivingDispatch2x3", kDispatch, Moment::kWhileReceiving, Fate::kKilled, 6, 3},
                    Scenario{"KilledBetweenCombineHalves3x2", kCombine, Moment::kBetweenHalves, Fate::kKilled, 6, 2},
                    Scenario{"KilledReceivingCombine2x3", kCombine, Moment::kWhileReceiving, Fate::kKilled, 6, 3},
                    Scenario{"StalledBetweenDispatchHalves4x1", kDispatch, Moment::kBetweenHalves, Fate::kStalled, 4,
                             1},
                    Scenario{"StalledBetweenCombineHalves2x3", kCombine, Moment::kBetweenHalves, Fate::kStalled, 6, 3}),
    name_of);

}  // namespace
}  // namespace ferry::test
