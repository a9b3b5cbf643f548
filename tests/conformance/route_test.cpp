#include <fmt/format.h>

#include "conformance/backend_config.hpp"

namespace ferry::test {
namespace {

class RouteConformance : public Conformance {
 protected:
  /// Adds routes without later calls, in every layout.
  static void add_layouts(std::vector<ExchangeCase>& cases, std::string name, WorldSpec world) {
    for (Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
      world.layout = layout;
      world.seed += 1;
      ExchangeCase one;
      one.name = fmt::format("{}, layout {}", name, static_cast<int>(layout));
      one.world = world;
      one.id_dtype = layout == Layout::kExperts ? DType::kInt32 : DType::kInt64;
      cases.push_back(one);
    }
  }
};

TEST_P(RouteConformance, EveryPatternAndTokenCount) {
  for (int num_ranks : {1, 2, 3, 5, 8}) {
    std::vector<ExchangeCase> cases;
    for (int pattern = 0; pattern <= static_cast<int>(RoutingPattern::kDuplicates); ++pattern) {
      for (int counts = 0; counts <= static_cast<int>(TokenCounts::kAllZero); ++counts) {
        WorldSpec world{.num_ranks = num_ranks, .num_topk = 4, .num_experts = 16};
        world.pattern = static_cast<RoutingPattern>(pattern);
        world.counts = static_cast<TokenCounts>(counts);
        world.seed = static_cast<std::uint64_t>(100 * pattern + 10 * counts);
        add_layouts(cases, fmt::format("pattern {} counts {}", pattern, counts), world);
      }
    }
    run_cases(num_ranks, cases);
  }
}

TEST_P(RouteConformance, ExpertsThatRanksDoNotDivide) {
  for (int num_ranks : {2, 3, 5, 8}) {
    std::vector<ExchangeCase> cases;
    for (std::int64_t num_experts : {1, 2, 7, 60}) {
      for (bool custom : {false, true}) {
        WorldSpec world{.num_ranks = num_ranks, .num_topk = 3, .num_experts = num_experts};
        world.custom_placement = custom;
        add_layouts(cases, fmt::format("E {} custom {}", num_experts, custom), world);
      }
    }
    run_cases(num_ranks, cases);
  }
}

TEST_P(RouteConformance, EveryTokenToEveryExpert) {
  std::vector<ExchangeCase> cases;
  for (int num_topk : {1, 8, kMaxTopk})
    add_layouts(cases, fmt::format("K = E = {}", num_topk),
                {.num_ranks = 4, .num_topk = num_topk, .num_experts = num_topk, .max_tokens = 5});
  run_cases(4, cases);
}

TEST_P(RouteConformance, AlignedExpertGroups) {
  std::vector<ExchangeCase> cases;
  for (std::int64_t alignment : {1, 2, 3, 16, 128}) {
    ExchangeCase one;
    one.name = fmt::format("alignment {}", alignment);
    one.world = {.num_ranks = 3, .num_topk = 2, .num_experts = 9, .layout = Layout::kExperts};
    one.world.expert_alignment = alignment;
    one.world.counts = TokenCounts::kUneven;
    cases.push_back(one);
    one.world.pattern = RoutingPattern::kNone;
    cases.push_back(one);
  }
  run_cases(3, cases);
}

TEST_P(RouteConformance, BoundedRows) {
  std::vector<ExchangeCase> cases;
  for (std::int64_t spare : {0, 1, 7}) {
    for (RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kNone, RoutingPattern::kOneHot}) {
      WorldSpec world{.num_ranks = 3, .num_topk = 2, .num_experts = 6};
      world.spare_recv_rows = spare;
      world.pattern = pattern;
      add_layouts(cases, fmt::format("spare {} pattern {}", spare, static_cast<int>(pattern)), world);
    }
  }
  run_cases(3, cases);
}

TEST_P(RouteConformance, SixteenRanks) {
  std::vector<ExchangeCase> cases;
  add_layouts(cases, "sixteen", {.num_ranks = 16, .num_topk = 8, .num_experts = 50, .counts = TokenCounts::kUneven});
  run_cases(16, cases);
}

INSTANTIATE_TEST_SUITE_P(Backends, RouteConformance, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
