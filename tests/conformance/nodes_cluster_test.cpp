#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "conformance/node_shape.hpp"
#include "support/exchange_check.hpp"
#include "support/latency_check.hpp"

/// Rank count of a cluster of eight hosts with eight GPUs each, and the experts of a large model.

namespace ferry::test {
namespace {

constexpr NodeShape kCluster{8, 8, "loopback"};

ExchangeCase model_on_cluster(const char* name, Layout layout) {
  ExchangeCase spec;
  spec.name = name;
  spec.world = {.num_topk = 8, .num_experts = 256, .max_tokens = 24, .layout = layout};
  return spec;
}

TEST(Cluster, EachLayoutIsTheOracles) {
  std::vector<PreparedCase> cases;
  for (const auto& [layout, name] : std::initializer_list<std::pair<Layout, const char*>>{
           {Layout::kTokens, "tokens"}, {Layout::kExperts, "experts"}, {Layout::kSlab, "slab"}}) {
    ExchangeCase spec = model_on_cluster(name, layout);
    spec.dispatches = {{.hidden = 256}, {.hidden = 256, .quantize = Quantization::kFp8}};
    spec.combines = {{.hidden = 256, .weighted = true, .num_biases = 1, .return_weights = layout == Layout::kTokens}};
    cases.push_back(prepare_on(kCluster, spec));
  }
  // Skewed load, as in real routings, and ranks without tokens.
  ExchangeCase uneven = model_on_cluster("uneven", Layout::kTokens);
  uneven.world.pattern = RoutingPattern::kZipf;
  uneven.world.counts = TokenCounts::kSomeZero;
  uneven.dispatches = {{.hidden = 256}};
  uneven.combines = {{.hidden = 256}};
  cases.push_back(prepare_on(kCluster, uneven));
  run_on_nodes(kCluster, [&](RankContext& context, Group& group) {
    for (const PreparedCase& one : cases) check_case(context, group, one);
  });
}

TEST(Cluster, LatencyModeIsTheOracles) {
  ExchangeCase spec = model_on_cluster("latency", Layout::kSlab);
  spec.world.max_tokens = 4;
  spec.dispatches = {{.hidden = 256, .quantize = Quantization::kFp8}};
  spec.combines = {{.hidden = 256, .weighted = true, .order = CombineOrder::kRankSums}};
  const PreparedCase prepared = prepare_on(kCluster, spec);
  run_on_nodes(kCluster, [&](RankContext& context, Group& group) {
    check_latency_case(context, group, prepared, Halves::kTogether);
  });
}

}  // namespace
}  // namespace ferry::test
