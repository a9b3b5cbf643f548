/// Thousands of calls of latency mode in a row on a stream, without waits in between, with any rank late; eager, and as
/// graphs replayed with other ids and other numbers of tokens. From time to time every byte is compared, and the memory
/// held must not have grown.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <random>

#include "gpu/latency_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
/// Pairs of a dispatch and a combine.
constexpr int kNumPairs = 5000;
constexpr int kPairsBetweenLooks = 50;
constexpr int kLongestDelayUs = 300;

/// Draws which rank is late for a pair, and by how much; all ranks draw the same values.
class Delays {
 public:
  /// Puts work before this rank's pair, if the rank is the late one.
  void perhaps_be_late(const RankContext& context, Stream stream) {
    const auto late_rank = static_cast<int>(random_() % kNumRanks);
    const auto late_by = static_cast<int>(random_() % kLongestDelayUs);
    const bool anyone = random_() % 4 == 0;
    if (anyone && late_rank == context.rank()) enqueue_delay(stream, std::chrono::microseconds(late_by));
  }

 private:
  std::mt19937_64 random_{77};
};

/// Checks that the memory held by a group does not grow between checks, while no call is in progress. Routings hold
/// placements and may share them at one check and not at the next.
class HeldMemory {
 public:
  void expect_flat(RankContext& context, const Group& group, int pair) {
    const std::size_t held = group.memory_usage().total_bytes();
    if (at_first_ == 0) at_first_ = held;
    context.expect(held <= at_first_ + kSpareBytes,
                   fmt::format("{} bytes are held after pair {}, {} at first", held, pair, at_first_));
  }

 private:
  /// A page for each of a few placements; a leak of one placement per check is far more.
  static constexpr std::size_t kSpareBytes = 8 * 4096;
  std::size_t at_first_ = 0;
};

class LatencyManyCalls : public testing::TestWithParam<bool> {};

TEST_P(LatencyManyCalls, OfLateRanksInFlatMemory) {
  constexpr int kNumCases = 8;
  std::mt19937_64 random(91);
  std::vector<PreparedCase> cases;
  for (int i = 0; i < kNumCases; ++i) {
    ExchangeCase one = draw_latency_case(random, kNumRanks);
    one.dispatches.resize(1);
    one.combines.resize(1);
    cases.push_back(prepare(one));
  }
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const RankStream stream(context);
    std::vector<std::unique_ptr<LatencyPair>> pairs;
    for (const PreparedCase& one : cases) pairs.push_back(std::make_unique<LatencyPair>(context, group, one));
    Delays delays;
    HeldMemory memory;
    meet(context);
    for (int pair = 0; pair < kNumPairs; ++pair) {
      const auto which = static_cast<std::size_t>(pair % kNumCases);
      delays.perhaps_be_late(context, stream.get());
      const Status status = pairs[which]->start(group, stream.get(), GetParam());
      if (!context.expect_ok(status, fmt::format("pair {}", pair))) return;
      if (pair % kPairsBetweenLooks != kPairsBetweenLooks - 1) continue;
      if (!context.expect_ok(group.wait(stream.get()), fmt::format("wait after pair {}", pair))) return;
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        pairs[i]->expect_received(context);
        pairs[i]->refill(context, cases[i]);
      }
      memory.expect_flat(context, group, pair);
      if (!context.failures().empty()) return context.fail(fmt::format("failed after pair {}", pair));
    }
    pairs.clear();
    context.expect_ok(group.destroy(), "destroy");
  });
}

/// Only calls, as in decoding: the calls themselves must find and reuse the memory of earlier Routings.
TEST_P(LatencyManyCalls, OfProgramsThatAskForNothingElse) {
  constexpr int kNumUnseenPairs = 3000;
  constexpr int kPairsAhead = 20;
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(2, 1);
  run_latency_group({.num_ranks = 2}, cases, [&](RankContext& context, Group& group) {
    const RankStream stream(context);
    LatencyPair pair(context, group, cases.front());
    meet(context);
    for (int number = 0; number < kNumUnseenPairs; ++number) {
      if (!context.expect_ok(pair.start(group, stream.get(), GetParam()), fmt::format("pair {}", number))) return;
      if (number % kPairsAhead == 0 && !context.expect_ok(group.wait(stream.get()), "wait")) return;
    }
    context.expect_ok(group.wait(stream.get()), "the last wait");
    pair.expect_received(context);
    meet(context);
  });
}

/// Replays the same graph throughout: all that changes is in memory, the number of tokens included.
TEST_P(LatencyManyCalls, OfReplayedGraphs) {
  constexpr int kNumCases = 16;
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, kNumCases, true);
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const RankStream stream(context);
    LatencyPair pair(context, group, cases.front());
    meet(context);
    CapturedGraph graph;
    graph.begin(stream.get());
    const Status captured = pair.start(group, stream.get(), GetParam());
    graph.end();
    if (!context.expect_ok(captured, "capturing")) return;
    graph.prepare();
    Delays delays;
    HeldMemory memory;
    for (int replay = 0; replay < kNumPairs; ++replay) {
      const int look = replay / kPairsBetweenLooks;
      const PreparedCase& one = cases[static_cast<std::size_t>(look % kNumCases)];
      if (replay % kPairsBetweenLooks == 0) {
        pair.refill(context, one);
        meet(context);  // no rank fills while others wait inside a kernel
      }
      delays.perhaps_be_late(context, stream.get());
      graph.launch();
      if (replay % kPairsBetweenLooks != kPairsBetweenLooks - 1) continue;
      if (!context.expect_ok(group.wait(stream.get()), fmt::format("wait after replay {}", replay))) return;
      pair.expect_received(context);
      memory.expect_flat(context, group, replay);
      if (!context.failures().empty()) return context.fail(fmt::format("failed after replay {}", replay));
    }
    meet(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Halves, LatencyManyCalls, testing::Bool(),
                         [](const auto& test) { return test.param ? "apart" : "together"; });

/// Launches of one process take turns, so a graph of many pairs shows the time per pair. Printed for readers.
TEST(LatencyGraph, OfFiftyPairsForEachRank) {
  constexpr int kPairsInGraph = 50;
  constexpr int kNumReplays = 20;
  ExchangeCase one;
  one.name = "one token per rank";
  one.world = {.num_ranks = kNumRanks, .num_topk = 8, .num_experts = 256, .max_tokens = 1};
  one.world.layout = Layout::kSlab;
  one.world.fixed_rows = kNumRanks;
  one.dispatches = {{.hidden = 7168, .quantize = Quantization::kFp8}};
  one.combines = {{.hidden = 7168, .weighted = true, .order = CombineOrder::kRankSums}};
  const std::vector<PreparedCase> cases = {prepare(one)};
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const RankStream stream(context);
    std::vector<std::unique_ptr<LatencyPair>> pairs;
    for (int i = 0; i < 2; ++i) pairs.push_back(std::make_unique<LatencyPair>(context, group, cases.front()));
    meet(context);
    CapturedGraph graph;
    graph.begin(stream.get());
    Status status;
    std::vector<Routing> routings;
    for (std::size_t i = 0; i < kPairsInGraph && status.ok(); ++i) {
      LatencyPair& pair = *pairs[i % pairs.size()];
      status = pair.start(group, stream.get(), false);
      routings.push_back(pair.routing());
    }
    graph.end();
    if (!context.expect_ok(status, "capturing")) return;
    graph.prepare();
    double best_us = 0;
    for (int replay = 0; replay < kNumReplays; ++replay) {
      meet(context);
      const auto begin = std::chrono::steady_clock::now();
      graph.launch();
      if (!context.expect_ok(group.wait(stream.get()), fmt::format("replay {}", replay))) return;
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
      const double per_pair_us = took.count() / kPairsInGraph;
      if (replay == 0 || per_pair_us < best_us) best_us = per_pair_us;
    }
    for (const auto& pair : pairs) pair->expect_received(context);
    if (context.rank() == 0) {
      std::printf("%d ranks, 1 token each, graphs of %d pairs: %.1f us per pair, launch included\n", kNumRanks,
                  kPairsInGraph, best_us);
    }
    meet(context);
  });
}

}  // namespace
}  // namespace ferry::test
