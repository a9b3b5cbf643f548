#include <fmt/format.h>

#include "conformance/backend_config.hpp"
#include "support/exchange_check.hpp"

namespace ferry::test {
namespace {

class CapacityConformance : public Conformance {
 protected:
  static ExchangeCase full_case(Layout layout, RoutingPattern pattern) {
    ExchangeCase one;
    one.name = fmt::format("layout {} pattern {}", static_cast<int>(layout), static_cast<int>(pattern));
    one.world = {.num_ranks = 3, .num_topk = 2, .num_experts = 7, .pattern = pattern, .layout = layout};
    one.world.counts = TokenCounts::kUneven;
    one.world.spare_recv_rows = 0;
    one.world.seed = 9;
    one.dispatches = {{}};
    one.combines = {{.weighted = true}};
    return one;
  }

  /// If route returns before the counts are known, a Routing exists nevertheless. No call on it may write anything, and
  /// each must report the error again on all ranks.
  static void expect_refused_use(RankContext& context, Group& group, const Routing& routing) {
    const TensorImage recv(payload_rows(DType::kBfloat16, routing.num_recv_rows(), 32, 0));
    const TensorImage own(payload_rows(DType::kBfloat16, routing.num_tokens(), 32, 0));
    const TestTensor recv_tensor(context, group, MemoryKind::kSymmetric, recv);
    const TestTensor own_tensor(context, group, MemoryKind::kSymmetric, own);
    Status status = group.dispatch(routing, {own_tensor.view(), {}, {}}, {recv_tensor.view(), {}, {}, {}, {}},
                                   stream_of(group), {.zero_padding = true});
    context.expect_code(finish(group, status), ErrorCode::kCapacity, "dispatch after one row too few");
    recv_tensor.expect_equal(context, recv, "received rows after a refused dispatch");
    status = group.combine(routing, {recv_tensor.view(), {}, {}, {}}, {own_tensor.view(), {}}, stream_of(group));
    context.expect_code(finish(group, status), ErrorCode::kCapacity, "combine after one row too few");
    own_tensor.expect_equal(context, own, "sums after a refused combine");
    if (routing.layout() == Layout::kTokens) expect_cleared_ids(context, group, routing, own_tensor.view());
  }

  /// Checks clear_if_refused, for programs that index with the ids before they learn of the error.
  static void expect_cleared_ids(RankContext& context, Group& group, const Routing& routing, const TensorView& x) {
    const std::int64_t num_rows = routing.num_recv_rows();
    const TensorImage rows(payload_rows(DType::kBfloat16, num_rows, 32, 0));
    const TensorImage ids(dense(DType::kInt64, num_rows, routing.num_topk()));
    const TensorImage source(dense(DType::kInt32, num_rows, 2));
    const TestTensor rows_tensor(context, group, MemoryKind::kSymmetric, rows);
    const TestTensor ids_tensor(context, group, MemoryKind::kSymmetric, ids);
    const TestTensor source_tensor(context, group, MemoryKind::kPlain, source);
    DispatchOptions options;
    options.clear_if_refused = options.zero_padding = true;
    const Status status =
        group.dispatch(routing, {x, {}, {}}, {rows_tensor.view(), {}, ids_tensor.view(), {}, source_tensor.view()},
                       stream_of(group), options);
    context.expect_code(finish(group, status), ErrorCode::kCapacity, "dispatch that clears its ids");
    rows_tensor.expect_equal(context, rows, "received rows after a refused dispatch that clears its ids");
    const auto minus_ones = [](const TensorImage& like) {
      TensorImage image = like;
      const Bytes ones(like.bytes().size(), std::byte{0xFF});
      image.set_rows(ones.data());
      return image;
    };
    ids_tensor.expect_equal(context, minus_ones(ids), "ids after a refused dispatch that clears them");
    source_tensor.expect_equal(context, minus_ones(source), "sources after a refused dispatch that clears them");
  }

  /// `full` just fits; `short_by_one` has one row too few on some rank. All ranks must refuse the latter and continue.
  void expect_refusal(const PreparedCase& full, const PreparedCase& short_by_one) const {
    ASSERT_EQ(oracle::route(short_by_one.world).status().code(), ErrorCode::kCapacity);
    run_with_group(full.world.num_ranks, [&](RankContext& context, Group& group) {
      for (int round = 0; round < 2; ++round) {
        check_case(context, group, full);
        const RouteArguments arguments(context, group, short_by_one);
        const auto routing = group.route(arguments.input(), arguments.options(), stream_of(group));
        const Status status = finish(group, routing.status());
        context.expect_code(status, ErrorCode::kCapacity, full.spec.name + ": one row too few");
        context.expect(status.message().find("would receive") != std::string_view::npos, status.to_string());
        if (routing.ok()) expect_refused_use(context, group, *routing);
      }
      check_case(context, group, full);
    });
  }
};

TEST_P(CapacityConformance, SlabExactAndOneShort) {
  for (RoutingPattern pattern : {RoutingPattern::kRandom, RoutingPattern::kOneHot, RoutingPattern::kDuplicates}) {
    const PreparedCase full = prepare(full_case(Layout::kSlab, pattern));
    PreparedCase short_by_one = full;
    short_by_one.world.options.slab_capacity -= 1;
    expect_refusal(full, short_by_one);
  }
}

TEST_P(CapacityConformance, BoundedRowsExactAndOneShortOnOneRank) {
  for (Layout layout : {Layout::kTokens, Layout::kExperts}) {
    const PreparedCase full = prepare(full_case(layout, RoutingPattern::kRandom));
    for (std::size_t rank = 0; rank < 3; ++rank) {
      ASSERT_GE(full.world.max_recv_rows[rank], 2) << "0 would mean that the host knows the rows";
      PreparedCase short_by_one = full;
      short_by_one.world.max_recv_rows[rank] -= 1;
      expect_refusal(full, short_by_one);
    }
  }
}

/// Alignment so large that the rows exceed an i32: 2^31 on each rank, then 2^32, whose low 32 bits are 0. Every rank
/// reports the same message, whether outputs are sized before or after route.
TEST_P(CapacityConformance, MoreRowsThanCanBeCounted) {
  constexpr int kNumRanks = 3;
  constexpr std::int64_t kAlignment = std::int64_t{1} << 30;
  for (const std::int64_t experts_per_rank : {2, 4}) {
    ExchangeCase spec = full_case(Layout::kExperts, RoutingPattern::kRandom);
    spec.world.num_experts = static_cast<int>(experts_per_rank * kNumRanks);
    spec.world.max_tokens = 64;  // gives every expert tokens
    spec.world.spare_recv_rows = -1;
    const PreparedCase fits = prepare(spec);
    PreparedCase exact = fits;
    exact.world.options.expert_alignment = kAlignment;
    PreparedCase bounded = exact;
    bounded.world.max_recv_rows.assign(kNumRanks, 1000);
    PreparedCase mixed = exact;
    mixed.world.max_recv_rows = {0, 1000, 1000};
    const std::int64_t num_rows = experts_per_rank * kAlignment;
    const std::string no_limit = fmt::format(
        "route: rank 0 would receive {} rows but the most that one rank can hold is 2147483647; use "
        "smaller batches or more ranks",
        num_rows);
    const std::string small_limit = fmt::format(
        "route: rank 0 would receive {} rows but max_recv_rows is 1000; raise it to at least that, or set "
        "0 to size outputs after route",
        num_rows);
    run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
      const auto expect_refused = [&](const PreparedCase& refused, const std::string& message) {
        const RouteArguments arguments(context, group, refused);
        const auto routing = group.route(arguments.input(), arguments.options(), stream_of(group));
        const Status status = finish(group, routing.status());
        context.expect_code(status, ErrorCode::kCapacity, message);
        context.expect(status.message() == message, status.to_string());
      };
      check_case(context, group, fits);
      expect_refused(exact, no_limit);
      expect_refused(bounded, small_limit);
      expect_refused(mixed, no_limit);
      check_case(context, group, fits);
    });
  }
}

TEST_P(CapacityConformance, SomeRanksBoundTheirRowsAndOthersDoNot) {
  PreparedCase mixed = prepare(full_case(Layout::kTokens, RoutingPattern::kRandom));
  mixed.world.max_recv_rows = {0, 50, 0};
  mixed.routings = oracle::route(mixed.world).value();
  mixed.dispatches.clear();
  mixed.combines.clear();
  run_with_group(3, [&](RankContext& context, Group& group) { check_case(context, group, mixed); });
}

/// With bounds on rows and tokens of all ranks, groups of several nodes need not wait for the host.
TEST_P(CapacityConformance, TokensAreBoundedToo) {
  for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
    const PreparedCase one = prepare(full_case(layout, RoutingPattern::kRandom));
    std::int64_t most = 0;
    for (const oracle::RankTokens& tokens : one.world.ranks) most = std::max(most, tokens.num_tokens);
    run_with_group(one.world.num_ranks, [&](RankContext& context, Group& group) {
      const RouteArguments arguments(context, group, one);
      for (const std::int64_t max_tokens : {most, most - 1, most + 7}) {
        RouteOptions options = arguments.options();
        options.max_tokens = max_tokens;
        const auto routing = group.route(arguments.input(), options, stream_of(group));
        const Status status = finish(group, routing.status());
        if (max_tokens < most) {
          context.expect_code(status, ErrorCode::kCapacity, "too many tokens");
          context.expect(status.message().find("max_tokens") != std::string_view::npos, status.to_string());
          continue;
        }
        if (!context.expect_ok(status, "bounded tokens")) return;
        expect_routing(context, group, *routing, one);
        for (std::size_t i = 0; i < one.dispatches.size(); ++i) check_dispatch(context, group, *routing, one, i);
        for (std::size_t i = 0; i < one.combines.size(); ++i) check_combine(context, group, *routing, one, i);
      }
    });
  }
}

TEST_P(CapacityConformance, AFullArenaIsReportedAndStaysUsable) {
  run_with_group(2, [&](RankContext& context, Group& group) {
    const std::size_t arena_bytes = group_options(context).arena_bytes;
    const auto too_much = group.allocate(arena_bytes + 1);
    context.expect_code(too_much.status(), ErrorCode::kCapacity, "allocate more than the arena");
    const std::size_t allocated_before = group.memory_usage().allocated_bytes;
    {
      const auto half = group.allocate(arena_bytes / 2);
      if (!context.expect_ok(half.status(), "allocate half of the arena")) return;
      context.expect(group.memory_usage().allocated_bytes >= allocated_before + arena_bytes / 2,
                     "memory_usage does not count an allocation");
      const auto another = group.allocate(arena_bytes / 2 + 1);
      context.expect_code(another.status(), ErrorCode::kCapacity, "allocate the other half and a byte");
    }
    context.expect(group.memory_usage().allocated_bytes == allocated_before, "memory was not freed");
    context.expect_ok(group.allocate(arena_bytes / 2).status(), "allocate half of the arena again");
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CapacityConformance, ::testing::ValuesIn(exchange_configs()), config_name);

}  // namespace
}  // namespace ferry::test
