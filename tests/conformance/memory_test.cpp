#include <fmt/format.h>

#include <algorithm>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"
#include "support/latency_check.hpp"

/// Memory of a group: the size that bytes_required returns, and no more than necessary after trim.

namespace ferry::test {
namespace {

constexpr std::size_t kPageBytes = 4096;

std::size_t round_up_to_page(std::int64_t bytes) {
  return (static_cast<std::size_t>(bytes) + kPageBytes - 1) / kPageBytes * kPageBytes;
}

class MemoryConformance : public Conformance {
 protected:
  /// A world with one dispatch and one combine of equal rows. Either weights travel both ways, or neither weights nor
  /// ids travel.
  ExchangeCase draw_batch(std::mt19937_64& random, int num_ranks) const {
    ExchangeCase spec;
    spec.world = draw_world_spec(random, num_ranks);
    spec.world.max_tokens *= 8;  // several pages of each tensor
    spec.name = fmt::format("random world {}", spec.world.seed);
    // Over several nodes hosts route these worlds, and hosts do not read GPUs' memory.
    spec.table_on_device = spec.world.seed % 2 == 0 && ranks_per_node(num_ranks) == num_ranks;
    spec.memory = random() % 2 == 0 ? MemoryKind::kSymmetric : MemoryKind::kPlain;
    const auto hidden = static_cast<std::int64_t>(8 * (1 + random() % 40));
    DispatchSpec dispatch{.hidden = hidden, .ask_tables = spec.world.weights};
    dispatch.num_scales = random() % 2 == 0 ? 0 : static_cast<std::int64_t>(1 + random() % 9);
    if (random() % 3 == 0) {
      dispatch.quantize = random() % 2 == 0 ? Quantization::kFp8 : Quantization::kInt8;
      dispatch.hidden = hidden / 16 * 16 + 16;
    }
    spec.dispatches = {dispatch};
    CombineSpec combine{.hidden = dispatch.hidden, .return_weights = spec.world.weights};
    if (random() % 3 == 0 && ranks_per_node(num_ranks) == num_ranks && !GetParam().verify) {
      constexpr std::int64_t kBlock = 128;
      spec.dispatches[0].hidden = combine.hidden = (hidden + kBlock - 1) / kBlock * kBlock;
      combine.wire_format = WireFormat::kFp8;
    }
    spec.combines = {combine};
    return spec;
  }

  /// `routing`: the case's Routing on this rank.
  MemoryShape shape_of(const RankContext& context, const PreparedCase& prepared, const Routing& routing) const {
    const ExchangeCase& spec = prepared.spec;
    MemoryShape shape;
    shape.backend = GetParam().backend;
    shape.num_ranks = context.num_ranks();
    shape.ranks_per_node = ranks_per_node(context.num_ranks());
    shape.num_experts = routing.num_physical_experts();
    shape.num_tokens = routing.num_tokens();
    shape.num_topk = routing.num_topk();
    shape.num_recv_rows = routing.num_recv_rows();
    shape.num_used_rows = routing.num_used_rows();
    shape.row_bytes = spec.dispatches[0].hidden * 2;
    shape.scale_row_bytes = spec.dispatches[0].num_scales * 4;
    const bool quantizes = spec.dispatches[0].quantize != Quantization::kNone;
    if (quantizes) shape.quantized_row_bytes = spec.dispatches[0].hidden;
    if (spec.combines[0].wire_format == WireFormat::kFp8) shape.combine_fp8_hidden = spec.combines[0].hidden;
    shape.layout = routing.layout();
    shape.weights = spec.world.weights;
    // Threads reach each other's ordinary memory.
    shape.symmetric = spec.memory == MemoryKind::kSymmetric || (!on_gpus() && GetParam().kind == RankKind::kThreads);
    shape.num_local_experts = routing.num_local_experts();
    if (spec.world.num_replicas >= 0) {
      shape.num_logical_experts = routing.num_experts();
      shape.placement_on_device = on_gpus() && spec.table_on_device;
    }
    shape.verify = GetParam().verify;
    shape.symmetric_tables = spec.memory == MemoryKind::kSymmetric;
    count_forwarded(context, prepared, shape);
    return shape;
  }

  static void count_forwarded(const RankContext& context, const PreparedCase& prepared, MemoryShape& shape) {
    std::vector<int> node_of_expert(static_cast<std::size_t>(shape.num_experts), -1);
    for (int rank = 0; rank < context.num_ranks(); ++rank) {
      for (std::int32_t expert : prepared.routings[static_cast<std::size_t>(rank)].local_expert_ids)
        node_of_expert[static_cast<std::size_t>(expert)] = rank / shape.ranks_per_node;
    }
    const int my_node = context.rank() / shape.ranks_per_node;
    for (int source = context.rank() % shape.ranks_per_node; source < context.num_ranks();
         source += shape.ranks_per_node) {
      const oracle::RankTokens& tokens = prepared.world.ranks[static_cast<std::size_t>(source)];
      for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
        const auto first = tokens.topk_idx.begin() + token * shape.num_topk;
        const auto entries = std::count_if(first, first + shape.num_topk, [&](std::int64_t expert) {
          return expert >= 0 && node_of_expert[static_cast<std::size_t>(expert)] == my_node;
        });
        shape.num_node_entries += entries;
        if (entries > 0) ++(source == context.rank() ? shape.num_node_tokens : shape.num_forwarded_tokens);
      }
    }
  }

  /// Returns true if this rank sends rows to other ranks and receives rows from them: staging on one CPU node depends
  /// on it.
  bool has_traffic(const RankContext& context, const Routing& routing) const {
    if (on_gpus() || ranks_per_node(context.num_ranks()) != context.num_ranks()) return true;
    bool sends = false;
    bool receives = false;
    for (int rank = 0; rank < context.num_ranks(); ++rank) {
      if (rank == context.rank()) continue;
      sends = sends || routing.num_rows_to_rank()[static_cast<std::size_t>(rank)] > 0;
      receives = receives || routing.num_rows_from_rank()[static_cast<std::size_t>(rank)] > 0;
    }
    return sends && receives;
  }

  void check_required(RankContext& context, Group& group, const PreparedCase& prepared) const {
    Routing routing;
    for (int repeat = 0; repeat < 3; ++repeat) {
      routing = check_route(context, group, prepared);
      if (!routing.present()) return;
    }
    check_dispatch(context, group, routing, prepared, 0);
    check_combine(context, group, routing, prepared, 0);
    expect_required(context, group, prepared, routing, shape_of(context, prepared, routing));
  }

  void check_latency_required(RankContext& context, Group& group, const PreparedCase& prepared) const {
    Routing routing;
    for (int repeat = 0; repeat < 3; ++repeat) {
      LatencyExchange exchange(context, group, prepared);
      const bool split = repeat == 1;
      if (split ? !(exchange.send_dispatch() && exchange.receive()) : !exchange.dispatch()) return;
      for (std::size_t i = 0; i < prepared.combines.size(); ++i) {
        if (split ? !(exchange.send_combine(i) && exchange.receive()) : !exchange.combine(i)) return;
      }
      routing = exchange.routing();
    }
    MemoryShape shape = shape_of(context, prepared, routing);
    shape.max_tokens = latency_max_tokens(prepared);
    expect_required(context, group, prepared, routing, shape);
  }

  void expect_required(RankContext& context, const Group& group, const PreparedCase& prepared, const Routing& routing,
                       const MemoryShape& shape) const {
    const Result<std::size_t> required = bytes_required(shape);
    if (!context.expect_ok(required.status(), "bytes_required")) return;
    // Tensors of the calls are already freed.
    std::size_t expected = *required + latency_bytes_;
    if (shape.symmetric) {
      const std::int64_t received_row_bytes =
          shape.quantized_row_bytes > 0 ? shape.quantized_row_bytes : shape.row_bytes;
      expected -= round_up_to_page(shape.num_tokens * shape.row_bytes) +
                  round_up_to_page(shape.num_recv_rows * received_row_bytes) +
                  round_up_to_page(shape.num_recv_rows * shape.row_bytes);
    }
    const MemoryUsage usage = group.memory_usage();
    const std::string what =
        fmt::format("{}: {} bytes are held ({} control, {} network, {} staging, {} allocated), {} required",
                    prepared.spec.name, usage.total_bytes(), usage.control_bytes, usage.network_bytes,
                    usage.staging_bytes, usage.allocated_bytes, expected);
    context.expect(usage.total_bytes() <= expected, what);
    if (shape.symmetric || has_traffic(context, routing)) context.expect(usage.total_bytes() == expected, what);
  }
};

TEST_P(MemoryConformance, BytesRequiredIsWhatIsHeld) {
  const int num_cases = on_gpus() ? 6 : 10;
  for (const int num_ranks : {1, 2, 4}) {
    std::mt19937_64 random(static_cast<std::uint64_t>(30 + num_ranks));
    std::vector<PreparedCase> cases;
    for (int i = 0; i < num_cases; ++i) cases.push_back(prepare(draw_batch(random, num_ranks)));
    run_on_ranks(num_ranks, [&](RankContext& context) {
      for (const PreparedCase& one : cases) {
        auto group = Group::create(context.bootstrap(), group_options(context));
        if (!context.expect_ok(group.status(), "Group::create")) return;
        check_required(context, **group, one);
        context.expect_ok((*group)->destroy(), "destroy");
      }
    });
  }
}

class LatencyMemory : public MemoryConformance {};

TEST_P(LatencyMemory, LatencyModeHoldsWhatBytesRequiredSays) {
  constexpr int kNumCases = 6;
  for (const int num_ranks : {1, 2, 4}) {
    std::mt19937_64 random(static_cast<std::uint64_t>(50 + num_ranks));
    std::vector<PreparedCase> cases;
    for (int i = 0; i < kNumCases; ++i) {
      ExchangeCase spec = draw_batch(random, num_ranks);
      spec.world.layout = Layout::kSlab;
      spec.combines = {{.hidden = spec.dispatches[0].hidden, .weighted = true, .own_weights = !spec.world.weights},
                       {.hidden = spec.dispatches[0].hidden,
                        .weighted = true,
                        .order = CombineOrder::kRankSums,
                        .own_weights = true}};
      cases.push_back(prepare(spec));
    }
    latency_bytes_ = latency_bytes_of(GetParam().backend, cases);
    run_on_ranks(num_ranks, [&](RankContext& context) {
      for (const PreparedCase& one : cases) {
        auto group = Group::create(context.bootstrap(), group_options(context));
        if (!context.expect_ok(group.status(), "Group::create")) return;
        check_latency_required(context, **group, one);
        context.expect_ok((*group)->destroy(), "destroy");
      }
    });
  }
}

/// A batch with rows of 4 KiB, weights and scales, in ordinary memory.
ExchangeCase large_batch(int num_ranks) {
  ExchangeCase spec;
  spec.name = "large batch";
  spec.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 16, .max_tokens = 200};
  spec.memory = MemoryKind::kPlain;
  spec.dispatches = {{.hidden = 2048, .num_scales = 16}};
  spec.combines = {{.hidden = 2048, .return_weights = true}};
  return spec;
}

TEST_P(MemoryConformance, TrimGivesStagingBackAndLaterCallsTakeItAgain) {
  const PreparedCase large = prepare(large_batch(4));
  run_with_group(4, [&](RankContext& context, Group& group) {
    const std::size_t at_first = group.memory_usage().staging_bytes;
    check_case(context, group, large);
    check_case(context, group, large);
    const MemoryUsage grown = group.memory_usage();
    context.expect_ok(group.trim(), "trim");
    const MemoryUsage trimmed = group.memory_usage();
    // CUDA keeps the placement of experts on the device.
    const std::size_t kept = on_gpus() ? 2 * kPageBytes : 0;
    context.expect(grown.staging_bytes > at_first + 5 * kPageBytes && trimmed.staging_bytes <= at_first + kept,
                   fmt::format("staging is {} bytes after trim, {} before, {} at first", trimmed.staging_bytes,
                               grown.staging_bytes, at_first));
    context.expect(trimmed.control_bytes == grown.control_bytes && trimmed.network_bytes == grown.network_bytes,
                   "trim changed control or network memory");
    context.expect_ok(group.trim(), "trim again");
    check_case(context, group, large);
    check_case(context, group, large);
    context.expect(group.memory_usage().staging_bytes == grown.staging_bytes, "the same batch needs the same staging");
  });
}

TEST_P(MemoryConformance, TrimOfADestroyedGroupIsAnError) {
  run_on_ranks(2, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), group_options(context));
    if (!context.expect_ok(group.status(), "Group::create")) return;
    context.expect_ok((*group)->destroy(), "destroy");
    context.expect_code((*group)->trim(), ErrorCode::kInvalidArgument, "trim");
  });
}

// Ranks may trim at any time, also right after a route that other ranks have not finished.
TEST_P(MemoryConformance, EveryRankTrimsAtItsOwnMoments) {
  constexpr int kNumRanks = 4;
  constexpr int kNumRounds = 60;
  std::mt19937_64 random(41);
  std::vector<PreparedCase> cases = {prepare(large_batch(kNumRanks))};
  while (cases.size() < 5) cases.push_back(prepare(draw_batch(random, kNumRanks)));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    std::mt19937_64 moments(static_cast<std::uint64_t>(context.rank()));
    const auto perhaps_trim = [&] {
      if (moments() % 2 == 0) context.expect_ok(group.trim(), "trim");
    };
    const int num_cases = static_cast<int>(cases.size());
    std::size_t at_first = 0;
    for (int round = 0; round < kNumRounds && context.failures().empty(); ++round) {
      const PreparedCase& one = cases[static_cast<std::size_t>(round % num_cases)];
      const Routing routing = check_route(context, group, one);
      if (!routing.present()) return;
      perhaps_trim();
      if (round % 3 == 0) continue;  // a route on its own
      check_dispatch(context, group, routing, one, 0);
      perhaps_trim();
      check_combine(context, group, routing, one, 0);
      perhaps_trim();
      if (round <= num_cases || round % num_cases != 1) continue;
      // These rounds repeat one case after all cases have run: they all hold the same memory after trim.
      context.expect_ok(group.trim(), "trim");
      const std::size_t held = group.memory_usage().total_bytes();
      if (at_first == 0) at_first = held;
      context.expect(held <= at_first, fmt::format("{} bytes are held in round {}, {} before", held, round, at_first));
    }
  });
}

/// whole_configs(), and those that verify their rows.
std::vector<BackendConfig> memory_configs() {
  std::vector<BackendConfig> configs = exchange_configs();
  const std::vector<BackendConfig> whole = whole_configs();
  std::erase_if(configs, [&whole](const BackendConfig& config) {
    return !config.verify && std::ranges::none_of(whole, [&](const BackendConfig& one) {
      return std::string_view(one.name) == config.name;
    });
  });
  return configs;
}

INSTANTIATE_TEST_SUITE_P(Backends, MemoryConformance, testing::ValuesIn(memory_configs()), config_name);
INSTANTIATE_TEST_SUITE_P(Backends, LatencyMemory, testing::ValuesIn(whole_configs()), config_name);

}  // namespace
}  // namespace ferry::test
