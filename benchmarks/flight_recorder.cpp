/// Host time that recording one call takes: the best of several rounds, and the same with the exact clock in place of
/// the system's tick for comparison. Prints JSON.

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/flight_recorder.hpp"

namespace {

constexpr int kNumRounds = 20;
constexpr int kNumCalls = 200'000;

/// Best time of `body`, in nanoseconds.
template <typename Body>
double best_ns(Body body) {
  double best = std::numeric_limits<double>::max();
  for (int round = 0; round < kNumRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kNumCalls; ++i) body(i);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - begin;
    best = std::min(best, time.count() / kNumCalls);
  }
  return best;
}

double clock_ns(clockid_t clock) {
  return best_ns([clock](int) {
    timespec now{};
    clock_gettime(clock, &now);
  });
}

}  // namespace

int main() {
  const auto record = std::make_unique<ferry::FlightRecord>();
  ferry::FlightRecorder recorder(*record);
  const double call_ns = best_ns([&recorder](int i) {
    recorder.begin(ferry::RecordedOperation::kLatencyDispatch);
    recorder.describe({.num_tokens = i, .num_topk = 8, .row_bytes = 7168, .dtype = ferry::DType::kBfloat16});
    recorder.end({}, ferry::CallPhase::kLaunched);
  });
  const nlohmann::json report = {{"recorded_call_ns", call_ns},
                                 {"tick_clock_ns", clock_ns(CLOCK_MONOTONIC_COARSE)},
                                 {"exact_clock_ns", clock_ns(CLOCK_MONOTONIC)},
                                 {"rounds", kNumRounds},
                                 {"calls_in_a_round", kNumCalls}};
  std::cout << report.dump(1) << '\n';
  return 0;
}
