#include "conformance/latency_conformance.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ferry::test {

std::vector<PreparedCase> LatencyConformance::prepare_latency(const std::vector<ExchangeCase>& cases) {
  std::vector<PreparedCase> prepared;
  for (const ExchangeCase& spec : cases) prepared.push_back(prepare(spec));
  latency_bytes_ = std::max(latency_bytes_, latency_bytes_of(GetParam().backend, prepared));
  return prepared;
}

PreparedCase LatencyConformance::prepare_latency(const ExchangeCase& one) { return prepare_latency({{one}}).front(); }

void LatencyConformance::run_latency_cases(int num_ranks, const std::vector<ExchangeCase>& cases,
                                           const KernelOptions& kernel) {
  const std::vector<PreparedCase> prepared = prepare_latency(cases);
  run_with_group(num_ranks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : prepared) {
      check_latency_case(context, group, one, Halves::kTogether, kernel);
      check_latency_case(context, group, one, Halves::kSplit, kernel);
    }
  });
}

ExchangeCase small_latency_case(int num_ranks, std::uint64_t seed) {
  ExchangeCase one;
  one.name = fmt::format("small case {}", seed);
  one.world = {.num_ranks = num_ranks, .num_topk = 3, .num_experts = 2 * num_ranks + 1, .max_tokens = 6};
  one.world.counts = TokenCounts::kUneven;
  one.world.layout = Layout::kSlab;
  one.world.spare_slab_rows = 2;
  one.world.seed = seed;
  one.dispatches = {{.hidden = 32, .num_scales = 2}};
  one.combines = {{.weighted = true}, {.weighted = true, .order = CombineOrder::kRankSums}};
  return one;
}

}  // namespace ferry::test
