#ifndef FERRY_TESTS_LATENCY_CONFORMANCE_HPP
#define FERRY_TESTS_LATENCY_CONFORMANCE_HPP

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/backend_config.hpp"
#include "support/latency_check.hpp"

namespace ferry::test {

/// ExchangeCase::spare_max_tokens of calls in which sums of GPU ranks do not travel as words (cuda/latency/window.hpp).
inline constexpr std::int64_t kManyTokens = 128;

/// Base of the suites of latency mode.
class LatencyConformance : public Conformance {
 protected:
  /// Oracle's results; groups that this test creates have room for calls of these shapes.
  std::vector<PreparedCase> prepare_latency(const std::vector<ExchangeCase>& cases);
  PreparedCase prepare_latency(const ExchangeCase& one);
  /// Checks the cases one after the other on one group: every case whole, and again in halves.
  void run_latency_cases(int num_ranks, const std::vector<ExchangeCase>& cases, const KernelOptions& kernel = {});
};

/// Those of backend_configs() whose groups verify rows, or those whose groups do not.
std::vector<BackendConfig> configs_that_verify(bool verify);

/// Makes one call, or both its halves, and returns its final status.
Status call_dispatch(Group& group, const LatencyDispatchTensors& tensors);
Status call_combine(Group& group, const Routing& routing, const LatencyCombineTensors& tensors);

/// Expects a refusal on all ranks with the same message, which names a call of latency mode and contains `words`.
void expect_same_refusal(RankContext& context, const Status& status, ErrorCode code, const std::string& what,
                         std::string_view words);

/// Refusals of every rank's own arguments, each with the text `words_of(rank)`. If hosts compare calls before making
/// them, all ranks get the first rank's mistake; in a CUDA group each rank gets its own mistake at once.
struct OwnRefusals {
  ErrorCode code = ErrorCode::kInvalidArgument;
  std::string what;
  std::function<std::string(int)> words_of;
};
void expect_own_refusals(RankContext& context, const Group& group, const Status& status, const OwnRefusals& refusals);

/// Small case whose experts do not divide evenly among the ranks, with rows that hold no token: one dispatch, one
/// combine in each order.
ExchangeCase small_latency_case(int num_ranks, std::uint64_t seed = 1);
/// The same with experts that have several homes, and some that have none.
ExchangeCase replicated_latency_case(int num_ranks, ReplicaChoice choice);

}  // namespace ferry::test

#endif  // FERRY_TESTS_LATENCY_CONFORMANCE_HPP
