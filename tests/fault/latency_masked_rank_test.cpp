/// Groups that mask lost ranks: the others mask a process that dies at any point of a latency mode call. Their calls
/// return ok, and their later results are those of the remaining ranks.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "core/agreement.hpp"
#include "fault/small_exchange.hpp"
#include "fault/small_latency_exchange.hpp"
#include "fault/trap_memory.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 5;
constexpr int kVictim = 2;
/// Longer than a rank computes between two calls on a busy machine.
constexpr std::int64_t kMaskTimeoutNs = 4 * kNsPerSecond;

/// Where the victim fails.
enum class Moment { kBeforeSending, kBetweenHalves, kWhileReceiving };

struct Scenario {
  const char* name;
  Operation operation;
  Moment moment;
  Fate fate;
};

std::string name_of(const testing::TestParamInfo<Scenario>& info) { return info.param.name; }

class LatencyMaskedRank : public testing::TestWithParam<Scenario> {
 protected:
  /// Returns unless the victim fails at this moment.
  void suffer(Moment moment, Operation operation) const {
    if (moment != GetParam().moment || operation != GetParam().operation) return;
    if (GetParam().fate == Fate::kKilled) kill(getpid(), SIGKILL);
    wait_for_survivors(words_, kNumRanks - 1);
    _exit(0);
  }

  /// Returns trap memory if the victim is to fail while reading in `operation`, else `memory`.
  const void* trap_or(const void* memory, Operation operation, std::size_t bytes) const {
    if (GetParam().moment != Moment::kWhileReceiving || operation != GetParam().operation) return memory;
    return make_trap_memory(bytes, GetParam().fate, words_, kNumRanks - 1);
  }

  void run_victim(RankContext& context, Group& group) const {
    SmallLatencyExchange exchange(group, false);
    exchange.x = trap_or(exchange.x, Operation::kLatencyDispatch,
                         SmallLatencyExchange::kNumTokens * SmallLatencyExchange::kRowBytes);
    suffer(Moment::kBeforeSending, Operation::kLatencyDispatch);
    context.expect_ok(exchange.send_dispatch(), "the send half of the dispatch");
    suffer(Moment::kBetweenHalves, Operation::kLatencyDispatch);
    context.expect_ok(exchange.receive(), "the receive half of the dispatch");
    exchange.y = trap_or(exchange.y, Operation::kLatencyCombine, exchange.slab_bytes());
    suffer(Moment::kBeforeSending, Operation::kLatencyCombine);
    context.expect_ok(exchange.send_combine(), "the send half of the combine");
    suffer(Moment::kBetweenHalves, Operation::kLatencyCombine);
    (void)exchange.receive();
    context.fail("the victim survived");
  }

  static void run_survivor(RankContext& context, Group& group) {
    SmallLatencyExchange exchange(group, false);
    // The rows lost with the victim depend on the moment it fails; the calls return ok in all cases.
    context.expect_ok(exchange.send_dispatch(), "the send half of the dispatch");
    context.expect_ok(exchange.receive(), "the receive half of the dispatch");
    context.expect_ok(exchange.send_combine(), "the send half of the combine");
    context.expect_ok(exchange.receive(), "the receive half of the combine");
    for (int round = 0; round < 3; ++round) {
      context.expect_ok(SmallLatencyExchange(group, round == 1).run_and_verify(kVictim), "later calls");
    }
    std::int32_t mask[kNumRanks] = {};
    context.expect_ok(group.latency_query_mask(TensorView(mask, DType::kInt32, {kNumRanks})), "query");
    for (int rank = 0; rank < kNumRanks; ++rank) {
      context.expect(mask[rank] == (rank == kVictim ? 1 : 0), fmt::format("mask of rank {} is {}", rank, mask[rank]));
    }
  }

  SharedWords* words_ = make_shared_words();
};

TEST_P(LatencyMaskedRank, TheOthersGoOnInTheSameGroup) {
  const std::vector<std::string> failures =
      collect_rank_failures({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, [this](RankContext& context) {
        GroupOptions options{.backend = "cpu"};
        options.mask_lost_ranks = true;
        options.mask_timeout_ns = kMaskTimeoutNs;
        Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
        if (!context.expect_ok(group.status(), "create")) return;
        if (context.rank() == kVictim) {
          run_victim(context, **group);
        } else {
          run_survivor(context, **group);
          report_survivor_done(words_);
          // Leaves after all survivors are done: a rank that has left is masked too.
          wait_for_survivors(words_, kNumRanks - 1);
        }
      });
  std::vector<std::string> expected;
  if (GetParam().fate == Fate::kKilled) expected.push_back(fmt::format("rank {}: died of signal 9", kVictim));
  EXPECT_EQ(failures, expected);
}

/// Rank 0 masks 1, rank 2 masks 3, and ranks 1 and 3 find out: each rank's rows lie elsewhere than its peers would put
/// them.
TEST(LatencyMasks, MayDiffer) {
  constexpr int kNumThreads = 4;
  run_ranks({.num_ranks = kNumThreads}, [](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.mask_lost_ranks = true;
    options.mask_timeout_ns = kMaskTimeoutNs;
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    const int partner = context.rank() % 2 == 0 ? context.rank() + 1 : context.rank() - 1;
    context.expect_ok(SmallLatencyExchange(**group, false).run_and_verify(), "before");
    if (context.rank() % 2 == 0) {
      context.expect_ok((*group)->latency_update_mask(partner, true), "latency_update_mask");
    }
    for (int round = 0; round < 20; ++round) {
      context.expect_ok(SmallLatencyExchange(**group, round % 2 == 0).run_and_verify(partner), "masked");
    }
    context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "meet");
  });
}

constexpr Operation kDispatch = Operation::kLatencyDispatch;
constexpr Operation kCombine = Operation::kLatencyCombine;

INSTANTIATE_TEST_SUITE_P(
    OneNode, LatencyMaskedRank,
    testing::Values(Scenario{"KilledBeforeDispatch", kDispatch, Moment::kBeforeSending, Fate::kKilled},
                    Scenario{"KilledBetweenDispatchHalves", kDispatch, Moment::kBetweenHalves, Fate::kKilled},
                    Scenario{"KilledReceivingDispatch", kDispatch, Moment::kWhileReceiving, Fate::kKilled},
                    Scenario{"KilledBeforeCombine", kCombine, Moment::kBeforeSending, Fate::kKilled},
                    Scenario{"KilledReceivingCombine", kCombine, Moment::kWhileReceiving, Fate::kKilled},
                    Scenario{"StalledBeforeDispatch", kDispatch, Moment::kBeforeSending, Fate::kStalled},
                    Scenario{"StalledReceivingDispatch", kDispatch, Moment::kWhileReceiving, Fate::kStalled},
                    Scenario{"StalledBetweenCombineHalves", kCombine, Moment::kBetweenHalves, Fate::kStalled}),
    name_of);

}  // namespace
}  // namespace ferry::test
