#ifndef FERRY_TESTS_LATENCY_CONFORMANCE_HPP
#define FERRY_TESTS_LATENCY_CONFORMANCE_HPP

#include <vector>

#include "conformance/backend_config.hpp"
#include "support/latency_check.hpp"

namespace ferry::test {

/// Base of the suites of latency mode.
class LatencyConformance : public Conformance {
 protected:
  /// The oracle's results; the groups that this test creates have room for calls of these shapes.
  std::vector<PreparedCase> prepare_latency(const std::vector<ExchangeCase>& cases);
  PreparedCase prepare_latency(const ExchangeCase& one);
  /// Checks the cases one after the other on one group: every case whole, and again in halves.
  void run_latency_cases(int num_ranks, const std::vector<ExchangeCase>& cases, const KernelOptions& kernel = {});
};

/// A small case whose experts the ranks do not divide, with rows that hold no token: one dispatch, and a combine in each
/// order.
ExchangeCase small_latency_case(int num_ranks, std::uint64_t seed = 1);

}  // namespace ferry::test

#endif  // FERRY_TESTS_LATENCY_CONFORMANCE_HPP
