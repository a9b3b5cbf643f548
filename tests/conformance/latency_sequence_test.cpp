#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "conformance/latency_conformance.hpp"
#include "support/growth_watch.hpp"
#include "support/latency_sequence.hpp"
#include "support/sanitizers.hpp"

/// Long random sequences of whole and split calls, which each rank receives at times of its own.

namespace ferry::test {
namespace {

class LatencySequences : public LatencyConformance {
 protected:
  std::vector<PreparedCase> random_cases(int num_ranks, int num_cases, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<ExchangeCase> cases;
    for (int i = 0; i < num_cases; ++i) cases.push_back(draw_latency_case(random, num_ranks, !GetParam().verify));
    return prepare_latency(cases);
  }

  std::vector<PreparedCase> other_cases(int num_ranks, int num_cases, std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::vector<PreparedCase> cases;
    for (int i = 0; i < num_cases; ++i) cases.push_back(prepare(draw_case(random, num_ranks)));
    return cases;
  }
};

/// A failure names the world's seed; the seeds are fixed.
TEST_P(LatencySequences, Random) {
  constexpr int kNumSteps = kSanitized ? 60 : 150;
  for (const int num_ranks : {1, 2, 3, 5, 8}) {
    const auto seed = static_cast<std::uint64_t>(500 + num_ranks);
    const std::vector<PreparedCase> cases = random_cases(num_ranks, 12, seed);
    const std::vector<PreparedCase> others = other_cases(num_ranks, 4, seed);
    run_with_group(num_ranks, [&](RankContext& context, Group& group) {
      LatencySequence sequence(context, group, cases, others, seed);
      for (int step = 0; step < kNumSteps; ++step) {
        if (!sequence.step()) return;
      }
      sequence.finish_all();
    });
  }
}

/// Late ranks change no result, and the group holds no more memory at the end than after warming up.
TEST_P(LatencySequences, ThousandsOfCallsOfLateRanksInFlatMemory) {
  constexpr int kNumRanks = 4;
  constexpr int kNumSamples = 5;
  // Calls take many times as long over sockets, or if processes take turns on one GPU.
  const bool slow =
      std::string_view(GetParam().transport) == "ucx" || (on_gpus() && GetParam().kind == RankKind::kProcesses);
  const int num_calls = kSanitized || slow ? 2000 : 10000;
  constexpr std::uint64_t kCallsPerStall = 50;
  constexpr std::uint64_t kLongestStallUs = 2000;
  const std::vector<PreparedCase> cases = random_cases(kNumRanks, 7, 81);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    std::mt19937_64 stalls(static_cast<std::uint64_t>(context.rank()));
    LatencySequence sequence(context, group, cases, {}, 82);
    GrowthWatch growth(context, group, GetParam().kind);
    // Runs every case twice: route's tables alternate between two blocks, and each block must have held the largest
    // tables.
    for (const PreparedCase& one : cases) {
      for (int repeat = 0; repeat < 2; ++repeat) check_latency_case(context, group, one, Halves::kTogether);
    }
    for (int sample = 0; sample < kNumSamples && context.failures().empty(); ++sample) {
      while (sequence.num_calls() < (sample + 1) * num_calls / kNumSamples) {
        // The length of the stall affects only which rank waits for which.
        if (stalls() % kCallsPerStall == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(stalls() % kLongestStallUs));
        }
        if (!sequence.step()) return;
      }
      if (!sequence.finish_all() || !growth.take_stock(sequence.num_calls())) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencySequences, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
