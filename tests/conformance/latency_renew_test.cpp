#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "conformance/renewable_rank.hpp"

/// Groups that mask lost ranks and are renewed: all survivors mask the same ranks, and results are bit for bit the
/// oracle's for those that are present.

namespace ferry::test {
namespace {

/// Longer than a rank computes between two calls on a busy machine.
constexpr std::int64_t kMaskTimeoutNs = 4 * kNsPerSecond;

class LatencyRenew : public RenewConformance {
 protected:
  GroupOptions options_of(const RankContext& context) const {
    GroupOptions options = group_options(context);
    options.mask_lost_ranks = is_one_node();
    options.mask_timeout_ns = kMaskTimeoutNs;
    return options;
  }
};

/// A rank ends between calls. The others call on without it, agree, and renew the group; then it comes back. Twice.
TEST_P(LatencyRenew, GoesOnWithoutARankAndWithTheOneThatTakesItsPlace) {
  constexpr int kVictim = 2;
  const std::vector<PreparedCase> prepared = cases({{}, {kVictim}});
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    RenewableRank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    const bool is_victim = context.rank() == kVictim;
    for (int round = 0; round < 2; ++round) {
      rank.check(prepared[0], {});
      meet_all(context);
      if (is_victim) {
        rank.end();
      } else {
        // Each masks it by itself.
        check_latency_case(context, rank.group(), prepared[1], Halves::kTogether);
      }
      // A rank that is suspended before the others have its rows is masked by them too.
      meet_all(context);
      if (!is_victim) {
        if (!context.expect_ok(rank.renew({0, 1, 3}), "renew without it")) return;
        rank.check(prepared[1], {kVictim});
      }
      const std::string contact = meet_all(context, is_victim ? "" : rank.members().address());
      if (context.rank() == 0) rank.await_joiner();
      const Status status = is_victim ? rank.come_back(contact) : rank.renew({0, 1, 2, 3});
      if (!replaces_threads()) {
        context.expect_code(status, ErrorCode::kUnsupported, "a rank that is a thread of this process");
        context.expect(status.message().find("since it is a thread of this process") != std::string_view::npos,
                       status.to_string());
        if (is_victim) {
          rank.end();
        } else if (context.expect_ok(rank.agree_and_renew({0, 1, 3}), "renew again without it")) {
          rank.check(prepared[1], {kVictim});
        }
        meet_all(context);
        return;
      }
      if (!context.expect_ok(status, "renew with it")) return;
      if (is_victim) rank.capture(prepared[0]);
      rank.check_others(prepared[0]);
    }
    rank.check(prepared[0], {});
    context.expect_ok(rank.group().destroy(), "destroy");
  });
}

/// An absent rank whose mask is ended by hand is masked again in the next call.
TEST_P(LatencyRenew, AnAbsentRankThatIsUnmaskedIsMaskedAgain) {
  constexpr int kVictim = 1;
  const std::vector<PreparedCase> prepared = cases({{}, {kVictim}});
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    RenewableRank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    rank.check(prepared[0], {});
    meet_all(context);
    if (context.rank() == kVictim) rank.end();
    if (rank.is_whole() && context.expect_ok(rank.renew({0, 2, 3}), "renew without it")) {
      context.expect_ok(rank.group().latency_clear_mask(stream_of(rank.group())), "latency_clear_mask");
      LatencyExchange exchange(context, rank.group(), prepared[1]);
      exchange.dispatch();  // masks it, so that the next call is without it from its start
      rank.check(prepared[1], {kVictim});
    }
    meet_all(context);
  });
}

/// Two ranks are lost, and come back one after the other: the first while the other is absent.
TEST_P(LatencyRenew, TakesLostRanksBackOneByOne) {
  const std::vector<PreparedCase> prepared = cases({{}, {0, 3}, {0}});
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    if (!is_one_node() || !replaces_threads()) return;
    RenewableRank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    const bool is_lost = context.rank() == 0 || context.rank() == 3;
    rank.check(prepared[0], {});
    meet_all(context);
    if (is_lost) rank.end();
    if (!is_lost && !context.expect_ok(rank.renew({1, 2}), "renew without both")) return;
    if (!is_lost) rank.check(prepared[1], {0, 3});
    for (const int back : {3, 0}) {
      const std::string contact = meet_all(context, context.rank() == 1 ? rank.members().address() : "", 1);
      if (context.rank() == 1) rank.await_joiner();
      const std::vector<int> present = back == 3 ? std::vector<int>{1, 2, 3} : std::vector<int>{0, 1, 2, 3};
      if (context.rank() == back) {
        if (!context.expect_ok(rank.come_back(contact), "come back")) return;
      } else if (rank.is_whole()) {
        if (!context.expect_ok(rank.renew(present), "renew with one more")) return;
      }
      if (rank.is_whole())
        rank.check(prepared[back == 3 ? 2 : 0], back == 3 ? std::vector<int>{0} : std::vector<int>{});
    }
    meet_all(context);
  });
}

/// A suspended rank is masked at once by ranks whose deadline is far.
TEST_P(LatencyRenew, NoRankWaitsForASuspendedOne) {
  const std::vector<PreparedCase> prepared = cases({{}, {1}});
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    if (!is_one_node()) return;
    GroupOptions options = options_of(context);
    options.mask_timeout_ns = 10 * kRenewPatienceNs;
    RenewableRank rank(context, options);
    if (!rank.is_whole()) return;
    rank.check(prepared[0], {});
    meet_all(context);  // calls that others are still making would go on without rank 1
    if (context.rank() == 1) {
      const auto silent = rank.group().suspend();
      context.expect(silent.ok() && silent->empty(), "no rank is silent");
      const Status refused = rank.group().latency_clear_mask();
      context.expect_code(refused, ErrorCode::kInvalidArgument, "a call of a suspended group");
      context.expect(refused.message().find("this group is suspended; call renew") != std::string_view::npos,
                     refused.to_string());
    } else {
      rank.check(prepared[1], {1});
    }
    if (!context.expect_ok(rank.agree_and_renew({0, 1, 2, 3}), "renew")) return;
    rank.check(prepared[0], {});
    context.expect_ok(rank.group().destroy(), "destroy");
  });
}

TEST_P(LatencyRenew, WrongArguments) {
  run_on_ranks(kRenewRanks, [&](RankContext& context) {
    RenewableRank rank(context, options_of(context));
    if (!rank.is_whole()) return;
    const auto expect_refusal = [&](const Status& status, ErrorCode code, std::string_view words) {
      context.expect_code(status, code, words);
      context.expect(status.message().find(words) != std::string_view::npos, status.to_string());
    };
    if (!is_one_node()) {
      expect_refusal(rank.group().suspend().status(), ErrorCode::kUnsupported, "suspend: the group has 2 nodes");
      expect_refusal(rank.group().renew(context.bootstrap(), {0, 1, 2, 3}), ErrorCode::kUnsupported,
                     "renew: the group has 2 nodes");
      return;
    }
    expect_refusal(rank.group().renew(nullptr, {0, 1, 2, 3}), ErrorCode::kInvalidArgument, "the bootstrap is null");
    expect_refusal(rank.group().renew(context.bootstrap(), {1, 0, 2, 3}), ErrorCode::kInvalidArgument,
                   "present_ranks is [1, 0, 2, 3]");
    expect_refusal(rank.group().renew(context.bootstrap(), {0, 1, 2}), ErrorCode::kInvalidArgument,
                   "expected the 4 ranks of the bootstrap");
    expect_refusal(rank.group().renew(context.bootstrap(), {0, 1, 2, 4}), ErrorCode::kInvalidArgument,
                   "below num_ranks, which is 4");
    GroupOptions options = options_of(context);
    options.mask_lost_ranks = false;
    options.ranks_per_node = 0;
    options.num_ranks = context.rank() == 0 ? 4 : 5;
    options.present_ranks = {0, 1, 2, 3};
    expect_refusal(Group::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                   "rank 0 has num_ranks=4, rank 1 has num_ranks=5");
    options.num_ranks = 5;
    options.present_ranks = {};
    expect_refusal(Group::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                   "num_ranks is 5 and the bootstrap has 4 ranks");
    context.expect_ok(rank.group().renew(context.bootstrap(), {0, 1, 2, 3}), "renew");
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyRenew, testing::ValuesIn(whole_configs()), config_name);

}  // namespace
}  // namespace ferry::test
