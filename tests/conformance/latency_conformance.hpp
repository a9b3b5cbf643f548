#ifndef FERRY_TESTS_LATENCY_CONFORMANCE_HPP
#define FERRY_TESTS_LATENCY_CONFORMANCE_HPP

#include <functional>
#include <string>
#include <string_view>
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

/// One call, or both its halves: how it ends.
Status call_dispatch(Group& group, const LatencyDispatchTensors& tensors);
Status call_combine(Group& group, const Routing& routing, const LatencyCombineTensors& tensors);

/// All ranks were refused, in the same words: those of a call of latency mode, which contain `words`.
void expect_same_refusal(RankContext& context, const Status& status, ErrorCode code, const std::string& what,
                         std::string_view words);

/// Every rank's own arguments were refused, each in the words of `words_of(rank)`. Ranks whose hosts compare calls
/// before they are made are all told what the first of them did wrong; a CUDA group tells each at once of its own
/// mistake.
struct OwnRefusals {
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::string what;
  std::function<std::string(int)> words_of;
};
void expect_own_refusals(RankContext& context, const Group& group, const Status& status, const OwnRefusals& refusals);

/// A small case whose experts the ranks do not divide, with rows that hold no token: one dispatch, one combine in each
/// order.
ExchangeCase small_latency_case(int num_ranks, std::uint64_t seed = 1);

}  // namespace ferry::test

#endif  // FERRY_TESTS_LATENCY_CONFORMANCE_HPP
