#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "conformance/renewable_rank.hpp"

/// Groups that do not mask lost ranks and are renewed without them: they break at a loss, and then results are bit for
/// bit the oracle's for the ranks that are present, until a process takes the place of the lost one.

namespace ferry::test {
namespace {

constexpr int kVictim = 1;

class LatencyAbsent : public RenewConformance {
 protected:
  /// Runs `with_all` on all ranks of a group, then `without` on those that are left when one has been lost and the
  /// group is renewed. `prepared`: a case with all ranks, and the same without the lost one. Then it comes back.
  void run_through_loss(const std::vector<PreparedCase>& prepared,
                        const std::function<void(RankContext&, RenewableRank&)>& without) const {
    run_on_ranks(kRenewRanks, [&](RankContext& context) {
      if (!is_one_node()) return;
      RenewableRank rank(context, group_options(context));
      if (!rank.is_whole()) return;
      rank.check_exchanges(prepared[0]);
      meet_all(context);
      const bool is_victim = context.rank() == kVictim;
      if (is_victim) {
        rank.end();
      } else {
        LatencyDispatchTensors tensors(context, rank.group(), prepared[0], 0);
        context.expect_code(call_dispatch(rank.group(), tensors), ErrorCode::kPeerLost, "a call that misses a rank");
        if (!context.expect_ok(rank.renew({0, 2, 3}), "renew without it")) return;
        without(context, rank);
      }
      const std::string contact = meet_all(context, is_victim ? "" : rank.members().address());
      if (!replaces_threads()) return;
      if (context.rank() == 0) rank.await_joiner();
      const Status status = is_victim ? rank.come_back(contact) : rank.agree_and_renew({0, 1, 2, 3});
      if (!context.expect_ok(status, "renew with it")) return;
      rank.check_exchanges(prepared[0]);
      rank.check_others(prepared[0]);
      context.expect_ok(rank.group().destroy(), "destroy");
    });
  }
};

/// Calls of a few tokens, whose sums travel as words, and of more.
TEST_P(LatencyAbsent, CallsAreMadeWithoutALostRank) {
  const std::vector<PreparedCase> few = cases({{}, {kVictim}});
  ExchangeCase spec = small_latency_case(kRenewRanks, 84);
  spec.world.num_topk = 4;
  spec.world.max_tokens = 40;
  spec.spare_max_tokens = kManyTokens;
  spec.world.counts = TokenCounts::kUneven;
  spec.dispatches.push_back({.hidden = 272, .quantize = Quantization::kFp8, .zero_padding = true});
  const std::vector<PreparedCase> many = cases_of(spec, {{}, {kVictim}});
  run_through_loss(few, [&](RankContext& context, RenewableRank& rank) {
    rank.check_exchanges(few[1]);
    rank.check_exchanges(many[1]);
    rank.check_exchanges(few[1]);
    RouteArguments arguments(context, rank.group(), few[1]);
    const Status refused = rank.group().route(arguments.input(), arguments.options()).status();
    context.expect_code(refused, ErrorCode::kInvalidArgument, "route");
    context.expect(refused.message().find("rank 1 is absent") != std::string_view::npos, refused.to_string());
    rank.check_exchanges(many[1]);
  });
}

/// Picks of an expert with a home on an absent rank move to another home if there is one; otherwise they add nothing.
TEST_P(LatencyAbsent, TokensPickTheHomesThatAreLeft) {
  for (const ReplicaChoice choice : {ReplicaChoice::kNearest, ReplicaChoice::kRoundRobin}) {
    const std::vector<PreparedCase> prepared = cases_of(replicated_latency_case(kRenewRanks, choice), {{}, {kVictim}});
    run_through_loss(prepared,
                     [&](RankContext& /*context*/, RenewableRank& rank) { rank.check_exchanges(prepared[1]); });
  }
}

/// A call that all ranks refuse because of one gives the same error on each, and the group stays usable.
TEST_P(LatencyAbsent, RefusedCalls) {
  const std::vector<PreparedCase> prepared = cases({{}, {kVictim}});
  run_through_loss(prepared, [&](RankContext& context, RenewableRank& rank) {
    for (const bool by_host : {true, false}) {
      LatencyDispatchTensors tensors(context, rank.group(), prepared[1], 0);
      if (context.rank() == 0) {
        if (by_host) {
          tensors.options.max_tokens = 0;
        } else {
          tensors.options.num_experts += 1;
        }
      }
      const Status status = call_dispatch(rank.group(), tensors);
      context.expect_code(status, ErrorCode::kInvalidArgument, "a refused call");
      const std::string_view words = by_host ? "rank 0: latency_dispatch: max_tokens is 0" : "num_experts";
      context.expect(status.message().find(words) != std::string_view::npos, status.to_string());
      rank.check_exchanges(prepared[1]);
    }
  });
}

/// A rank that is lost while another one is absent breaks the group again; those that are left go on.
TEST_P(LatencyAbsent, AnotherLossBreaksTheGroupAgain) {
  const std::vector<PreparedCase> prepared = cases({{}, {0, 3}, {3}});
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    RenewableRank rank(context, group_options(context));
    if (!rank.is_whole()) return;
    for (const int lost : {3, 0}) {
      if (rank.is_whole()) rank.check_exchanges(prepared[lost == 3 ? 0 : 2]);
      meet_all(context);
      if (context.rank() == lost) rank.end();
      if (!rank.is_whole()) continue;
      LatencyDispatchTensors tensors(context, rank.group(), prepared[0], 0);
      const Status status = call_dispatch(rank.group(), tensors);
      context.expect_code(status, ErrorCode::kPeerLost, "a call that misses a rank");
      context.expect(status.peer() == lost, fmt::format("rank {} is lost: {}", lost, status.to_string()));
      const std::vector<int> left = lost == 3 ? std::vector<int>{0, 1, 2} : std::vector<int>{1, 2};
      if (!context.expect_ok(rank.renew(left), "renew without it")) return;
    }
    if (rank.is_whole()) {
      rank.check_exchanges(prepared[1]);
      context.expect_ok(rank.group().destroy(), "destroy");
    }
    meet_all(context);
  });
}

/// A rank that lives and makes no more calls is named after the deadline.
TEST_P(LatencyAbsent, ARankThatStopsCallingIsSilent) {
  constexpr std::int64_t kDeadlineNs = 4 * kNsPerSecond;
  const std::vector<PreparedCase> prepared = cases({{}, {kVictim}});
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    GroupOptions options = group_options(context);
    options.timeout_ns = kDeadlineNs;
    RenewableRank rank(context, options);
    if (!rank.is_whole()) return;
    rank.check_exchanges(prepared[0]);
    meet_all(context);
    if (context.rank() != kVictim) {
      LatencyDispatchTensors tensors(context, rank.group(), prepared[0], 0);
      const Status status = call_dispatch(rank.group(), tensors);
      context.expect_code(status, ErrorCode::kTimeout, "a call that misses a rank");
      const auto silent = rank.group().suspend();
      context.expect(silent.ok() && *silent == std::vector<int>{kVictim}, "the rank that is waited for is silent");
    }
    meet_all(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyAbsent, testing::ValuesIn(whole_configs()), config_name);

}  // namespace
}  // namespace ferry::test
