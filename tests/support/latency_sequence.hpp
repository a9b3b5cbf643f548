#ifndef FERRY_TESTS_LATENCY_SEQUENCE_HPP
#define FERRY_TESTS_LATENCY_SEQUENCE_HPP

/// Endless random calls of latency mode on one rank. All ranks draw the same calls, but each rank draws by itself when
/// it receives split calls, so that the ranks' halves interleave in many ways.

#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <span>

#include "support/latency_check.hpp"

namespace ferry::test {

class LatencySequence {
 public:
  /// `cases` are for latency mode; `others`, if any, are routed, dispatched and combined between them.
  LatencySequence(RankContext& context, Group& group, std::span<const PreparedCase> cases,
                  std::span<const PreparedCase> others, std::uint64_t seed);

  /// Makes one call that all ranks make, and receives up to some of this rank's halves. False after an error.
  bool step();
  /// Receives all calls in flight, and drops all Routings.
  bool finish_all();
  /// Calls of latency mode so far; a split call counts once.
  int num_calls() const { return num_calls_; }

 private:
  enum class Phase { kDispatchSent, kReady, kCombineSent };
  struct Open {
    LatencyExchange exchange;
    Phase phase = Phase::kReady;
  };

  bool begin(std::optional<Open>& slot, std::uint64_t drawn);
  bool combine(Open& open, std::uint64_t drawn);
  bool receive(Open& open);
  bool receive_any(std::optional<Phase> phase);
  bool make_room(Phase phase);

  RankContext& context_;
  Group& group_;
  std::span<const PreparedCase> cases_;
  std::span<const PreparedCase> others_;
  std::mt19937_64 plan_;  // the same on every rank
  std::mt19937_64 mine_;
  int num_calls_ = 0;
  /// More than may be in flight, so that some Routings have no call in flight.
  std::array<std::optional<Open>, 2 * kMaxLatencyCallsInFlight + 1> open_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_LATENCY_SEQUENCE_HPP
