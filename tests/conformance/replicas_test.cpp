#include <fmt/format.h>

#include "conformance/latency_conformance.hpp"
#include "support/exchange_check.hpp"
#include "support/load_check.hpp"

/// Experts with several homes: the home that every token picks, and all results that follow, equal the oracle's.

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;

class Replicas : public LatencyConformance {
 protected:
  static ExchangeCase replicas_case(int num_ranks, Layout layout, ReplicaChoice choice) {
    ExchangeCase one;
    one.name = fmt::format("layout {} choice {}", static_cast<int>(layout), static_cast<int>(choice));
    one.world = {.num_ranks = num_ranks, .num_topk = 3, .num_experts = 9, .layout = layout};
    one.world.num_replicas = 2 * num_ranks + 1;
    one.world.replica_choice = choice;
    one.world.expert_alignment = 3;
    one.world.counts = TokenCounts::kUneven;
    one.world.seed = static_cast<std::uint64_t>(100 * num_ranks + 10 * static_cast<int>(layout));
    one.dispatches = {{.hidden = 16, .num_scales = 2, .zero_padding = true}, {.hidden = 24, .own_weights = true}};
    one.combines = {{.hidden = 16}, {.hidden = 16, .weighted = true, .num_biases = 1, .return_weights = true}};
    return one;
  }
};

TEST_P(Replicas, EveryLayoutChoiceAndPattern) {
  for (const int num_ranks : {1, 2, 4, 6}) {
    std::vector<ExchangeCase> cases;
    for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
      for (const ReplicaChoice choice : {ReplicaChoice::kNearest, ReplicaChoice::kRoundRobin}) {
        for (const RoutingPattern pattern :
             {RoutingPattern::kRandom, RoutingPattern::kZipf, RoutingPattern::kOneHot, RoutingPattern::kDuplicates}) {
          ExchangeCase one = replicas_case(num_ranks, layout, choice);
          one.world.pattern = pattern;
          one.world.seed += cases.size();
          one.world.custom_placement = cases.size() % 2 == 1;
          one.world.max_tokens = cases.size() % 4 == 1 ? 150 : 12;  // CPU ranks pick in another way for many tokens
          one.world.spare_recv_rows = cases.size() % 3 == 0 ? 4 : -1;
          one.id_dtype = cases.size() % 4 < 2 ? DType::kInt64 : DType::kInt32;
          one.memory = static_cast<MemoryKind>(cases.size() % 3);
          // Over several nodes, hosts route if tokens are not bounded, and hosts do not read GPUs' memory.
          one.table_on_device = cases.size() % 5 < 2 && ranks_per_node(num_ranks) == num_ranks;
          cases.push_back(one);
        }
      }
    }
    run_cases(num_ranks, cases);
  }
}

TEST_P(Replicas, MoreHostedThanInUse) {
  // Sixteen physical experts, of which nine are homes, different ones in each call of one group.
  std::vector<ExchangeCase> cases;
  for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab, Layout::kTokens}) {
    ExchangeCase one = replicas_case(2, layout, ReplicaChoice::kNearest);
    one.world.num_replicas = 7;
    one.world.seed += 17 * cases.size();
    cases.push_back(one);
  }
  run_cases(2, cases);
}

TEST_P(Replicas, ExpertsWithoutAHome) {
  for (const int num_ranks : {1, 3, 4}) {
    std::vector<ExchangeCase> cases;
    for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
      for (const RoutingPattern pattern :
           {RoutingPattern::kRandom, RoutingPattern::kZipf, RoutingPattern::kOneHot, RoutingPattern::kDuplicates}) {
        ExchangeCase one = replicas_case(num_ranks, layout, ReplicaChoice::kNearest);
        one.world.pattern = pattern;
        one.world.seed += cases.size();
        one.world.num_replicas = cases.size() % 3 == 0 ? 0 : 3;
        // One, some or all; with fewer replicas than that, P is below E.
        one.world.num_homeless = cases.size() % 5 == 4 ? 9 : 1 + static_cast<std::int64_t>(cases.size() % 5);
        one.world.custom_placement = cases.size() % 2 == 1;
        one.world.max_tokens = cases.size() % 4 == 1 ? 150 : 12;  // CPU ranks pick in another way for many tokens
        one.world.spare_recv_rows = cases.size() % 3 == 0 ? 4 : -1;
        one.id_dtype = cases.size() % 4 < 2 ? DType::kInt64 : DType::kInt32;
        one.table_on_device = cases.size() % 5 < 2 && ranks_per_node(num_ranks) == num_ranks;
        cases.push_back(one);
      }
    }
    run_cases(num_ranks, cases);
  }
}

TEST_P(Replicas, ExpertsWithoutAHomeInLatencyMode) {
  for (const int num_ranks : {1, 3, 4}) {
    std::vector<ExchangeCase> cases;
    for (int i = 0; i < 4; ++i) {
      ExchangeCase one = small_latency_case(num_ranks, static_cast<std::uint64_t>(140 + i));
      one.name = fmt::format("latency {}", i);
      one.world.num_replicas = i;
      one.world.num_homeless = i == 3 ? one.world.num_experts : 2 + i;
      one.world.replica_choice = i % 2 == 0 ? ReplicaChoice::kNearest : ReplicaChoice::kRoundRobin;
      one.world.pattern = i < 2 ? RoutingPattern::kRandom : RoutingPattern::kDuplicates;
      one.world.custom_placement = i == 2;
      one.table_on_device = i % 2 == 1;
      cases.push_back(one);
    }
    run_latency_cases(num_ranks, cases);
  }
}

TEST_P(Replicas, TheSamePlacementIsRefusedIfHomelessExpertsAreNotAllowed) {
  ExchangeCase spec = replicas_case(kNumRanks, Layout::kTokens, ReplicaChoice::kNearest);
  spec.world.num_homeless = 2;
  const PreparedCase good = prepare(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    check_route(context, group, good);
    const RouteArguments arguments(context, group, good);
    RouteOptions options = arguments.options();
    options.placement.allow_homeless = false;
    Status status = finish(group, group.route(arguments.input(), options, stream_of(group)).status());
    context.expect_code(status, ErrorCode::kInvalidArgument, "not allowed: ");
    check_route(context, group, good);
  });
}

TEST_P(Replicas, OneHomeEachIsTheSameAsNoPlacement) {
  ExchangeCase one = replicas_case(kNumRanks, Layout::kTokens, ReplicaChoice::kNearest);
  PreparedCase with = prepare(one);
  one.world.num_replicas = -1;
  const PreparedCase without = prepare(one);
  with = without;
  for (std::int32_t expert = 0; expert < one.world.num_experts; ++expert) {
    with.given.options.placement.physical_to_logical.push_back(expert);
  }
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    check_case(context, group, without);
    check_case(context, group, with);
    check_case(context, group, without);
  });
}

TEST_P(Replicas, LatencyMode) {
  for (const int num_ranks : {1, 3, 4}) {
    std::vector<ExchangeCase> cases;
    for (int i = 0; i < 4; ++i) {
      ExchangeCase one = small_latency_case(num_ranks, static_cast<std::uint64_t>(40 + i));
      one.name = fmt::format("latency {}", i);
      one.world.num_replicas = 2 * i;
      one.world.replica_choice = i % 2 == 0 ? ReplicaChoice::kNearest : ReplicaChoice::kRoundRobin;
      one.world.pattern = i < 2 ? RoutingPattern::kRandom : RoutingPattern::kDuplicates;
      one.world.custom_placement = i == 3;
      one.world.idle_tail = i == 1;
      one.table_on_device = i % 2 == 1;
      cases.push_back(one);
    }
    run_latency_cases(num_ranks, cases);
  }
}

TEST_P(Replicas, LatencyModeAddsToCounters) {
  ExchangeCase one = small_latency_case(kNumRanks, 7);
  one.world.num_replicas = 4;
  std::vector<ExchangeCase> specs;
  for (std::uint64_t seed = 56; seed < 64; ++seed) {  // all counters, in every dtype
    one.world.seed = seed;
    one.world.num_homeless = seed % 2 == 0 ? 0 : 2;
    specs.push_back(one);
  }
  const std::vector<PreparedCase> cases = prepare_latency(specs);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (const PreparedCase& prepared : cases) {
      const CounterTensors counters(context, group, prepared);
      for (int call = 1; call <= 2; ++call) {
        LatencyDispatchTensors tensors(context, group, prepared, 0);
        tensors.options.counters = counters.views();
        tensors.options.split = call == 2;
        const Result<Routing> routing =
            group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
        Status status = finish(group, routing.status());
        if (status.ok() && tensors.options.split) {
          status = finish(group, group.latency_receive(*routing, stream_of(group)));
        }
        if (!context.expect_ok(status, "latency_dispatch: ")) return;
        counters.expect_counted(context, fmt::format("seed {}: ", prepared.spec.world.seed), call);
      }
    }
  });
}

struct BadPlacement {
  std::string words;
  std::function<void(RouteOptions&)> spoil;
};

TEST_P(Replicas, BadOnesAreRefusedAlikeOnEveryRank) {
  ExchangeCase spec = replicas_case(kNumRanks, Layout::kTokens, ReplicaChoice::kNearest);
  spec.world.num_experts = 4;
  spec.world.num_replicas = -1;
  spec.world.seed = 56;  // all counters
  PreparedCase good = prepare(spec);
  good.given.options.placement.physical_to_logical = {0, 1, 2, 3, -1, 2};
  good.world = oracle::physical_world(good.given);
  good.routings = oracle::route(good.world).value();
  const auto table = [](RouteOptions& options) -> std::vector<std::int32_t>& {
    return options.placement.physical_to_logical;
  };
  const std::vector<BadPlacement> mistakes = {
      {"no entry of physical_to_logical is expert 3, expected at least one home",
       [&](RouteOptions& options) { table(options)[3] = 1; }},
      {"physical_to_logical[4] is 4, expected -1", [&](RouteOptions& options) { table(options)[4] = 4; }},
      {"physical_to_logical[5] is -2, expected -1", [&](RouteOptions& options) { table(options)[5] = -2; }},
      {"3 physical experts, expected a home for each of 4", [&](RouteOptions& options) { table(options).resize(3); }},
      {"physical_to_rank has 2 entries",
       [](RouteOptions& options) {
         options.placement.physical_to_rank = {0, 1};
       }},
      {"physical_to_rank[5] is 3, expected a rank from 0 to 2",
       [](RouteOptions& options) { options.placement.physical_to_rank = {0, 0, 1, 1, 2, kNumRanks}; }},
      {"physical_to_rank has 6 entries and physical_to_logical none",
       [&](RouteOptions& options) {
         options.placement = {.physical_to_rank = {0, 0, 1, 1, 2, 2}};
       }},
      {"choice is 7", [](RouteOptions& options) { options.placement.choice = static_cast<ReplicaChoice>(7); }},
      {"expert_to_rank and placement are both given",
       [](RouteOptions& options) {
         options.expert_to_rank = {0, 0, 1, 1};
       }},
      {"physical_to_logical[1]: rank 0 has",
       [&](RouteOptions& options) { std::swap(table(options)[1], table(options)[2]); }},
      {"physical_to_rank[1]: rank 0 has",
       [](RouteOptions& options) { options.placement.physical_to_rank = {0, 1, 0, 1, 2, 2}; }},
      {"choice of replicas (0: nearest, 1: round robin): rank 0 has",
       [](RouteOptions& options) { options.placement.choice = ReplicaChoice::kRoundRobin; }},
      {"allow_homeless: rank 0 has", [](RouteOptions& options) { options.placement.allow_homeless = true; }},
      {"physical experts of the placement (0: none is given): rank 0 has",
       [](RouteOptions& options) { options.placement = {}; }},
      {"physical experts of the placement (0: none is given): rank 0 has",
       [&](RouteOptions& options) { table(options).push_back(0); }},
      {"counters.logical is [6]", [](RouteOptions& options) { options.counters.logical.shape[0] = 6; }},
      {"counters.physical is [4]", [](RouteOptions& options) { options.counters.physical.shape[0] = 4; }},
      {"counters.received is [6]", [](RouteOptions& options) { options.counters.received.shape[0] = 6; }},
      {"counters.homeless is [2]", [](RouteOptions& options) { options.counters.homeless.shape[0] = 2; }},
      {"counters.received has dtype f32",
       [](RouteOptions& options) { options.counters.received.dtype = DType::kFloat32; }},
  };
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    PlainMemory memory(uses_device(group), 64);
    for (const int bad_rank : {0, kNumRanks - 1}) {
      for (const BadPlacement& mistake : mistakes) {
        const RouteArguments arguments(context, group, good);
        RouteOptions options = arguments.options();
        options.counters = {
            TensorView(memory.data(), DType::kInt64, {4}), TensorView(memory.data(), DType::kInt64, {6}),
            TensorView(memory.data(), DType::kInt64, {2}), TensorView(memory.data(), DType::kInt64, {1})};
        const Bytes before = read_memory(uses_device(group), memory.data(), 64);
        if (context.rank() == bad_rank) {
          mistake.spoil(options);
          // Counter sizes follow from the placement, and a good rank's counters fit its own placement.
          if (mistake.words.starts_with("physical experts")) options.counters = {};
        }
        const Status status = finish(group, group.route(arguments.input(), options, stream_of(group)).status());
        context.expect_code(status, ErrorCode::kInvalidArgument, mistake.words);
        context.expect(status.message().find(mistake.words) != std::string_view::npos,
                       fmt::format("\"{}\" is not in \"{}\"", mistake.words, status.message()));
        context.expect(status.message().find(fmt::format("rank {}", bad_rank)) != std::string_view::npos,
                       fmt::format("does not name rank {}: {}", bad_rank, status.message()));
        context.expect(read_memory(uses_device(group), memory.data(), 64) == before,
                       mistake.words + ": counters were written");
      }
      const Routing routing = check_route(context, group, good);
      context.expect(routing.present(), "no route after a refused one");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Replicas, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
