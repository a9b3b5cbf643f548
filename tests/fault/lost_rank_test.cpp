/// A rank that fails inside route, dispatch or combine: every other rank gets an error that names it within bounded
/// time, and can continue without the failed rank.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "fault/lost_rank.hpp"
#include "fault/small_exchange.hpp"
#include "node/futex.hpp"

namespace ferry::test {
namespace {

struct Scenario {
  const char* name;
  Operation operation;
  Fate fate;
  bool symmetric;
  int num_ranks = 5;
  int ranks_per_node = 0;  // 0: all
};

std::string name_of(const testing::TestParamInfo<Scenario>& info) { return info.param.name; }

class LostRank : public testing::TestWithParam<Scenario> {
 protected:
  void run_victim(Group& group) const {
    SmallExchange exchange(group, GetParam().symmetric);
    const auto rows_bytes = static_cast<std::size_t>(SmallExchange::kNumTokens * SmallExchange::kRowBytes);
    constexpr std::int64_t kRows = SmallExchange::kNumTokens;
    if (GetParam().operation == Operation::kRoute) {
      constexpr std::int64_t kManyTokens = 2048;
      const std::byte* trap = make_trap_memory(kManyTokens * SmallExchange::kNumTopk * 8, GetParam().fate, run_.words(),
                                               run_.num_survivors());
      exchange.topk_idx = ConstTensorView(trap, DType::kInt64, {kManyTokens, SmallExchange::kNumTopk});
    }
    (void)exchange.route();
    const std::byte* trap = make_trap_memory(rows_bytes, GetParam().fate, run_.words(), run_.num_survivors());
    if (GetParam().operation == Operation::kDispatch) {
      exchange.x = ConstTensorView(trap, DType::kBfloat16, {kRows, SmallExchange::kHidden});
    }
    (void)exchange.dispatch();
    exchange.bias = ConstTensorView(trap, DType::kBfloat16, {kRows, SmallExchange::kHidden});
    (void)exchange.combine();
  }

  void run_survivor(RankContext& context, std::shared_ptr<Group> group) const {
    SmallExchange exchange(*group, GetParam().symmetric);
    Status status;
    const std::int64_t begin_ns = node::monotonic_ns();
    status = exchange.route();
    if (status.ok()) status = exchange.dispatch();
    if (status.ok()) status = exchange.combine();
    // A rank of another node may have received all it needs before the victim failed: its next call returns the error.
    const bool reported_later = status.ok() && GetParam().ranks_per_node != 0;
    if (reported_later) status = exchange.route();
    run_.expect_interrupted(context, status, begin_ns);
    const Status later = exchange.route();
    run_.go_on_without_it(context, std::move(group), later,
                          [](Group& second) { return SmallExchange(second, GetParam().symmetric).run_and_verify(); });
  }

  const LostRankRun run_{{GetParam().fate, GetParam().operation, GetParam().num_ranks, GetParam().ranks_per_node}};
};

TEST_P(LostRank, IsNamedByAllOthersWhoGoOnWithoutIt) {
  run_.run([this](RankContext&, Group& group) { run_victim(group); },
           [this](RankContext& context, std::shared_ptr<Group> group) { run_survivor(context, std::move(group)); });
}

INSTANTIATE_TEST_SUITE_P(OneNode, LostRank,
                         testing::Values(Scenario{"KilledInRoute", Operation::kRoute, Fate::kKilled, true},
                                         Scenario{"KilledWhilePushing", Operation::kDispatch, Fate::kKilled, true},
                                         Scenario{"KilledWhileStaging", Operation::kDispatch, Fate::kKilled, false},
                                         Scenario{"KilledInCombine", Operation::kCombine, Fate::kKilled, true},
                                         Scenario{"KilledInCombineOfStagedRows", Operation::kCombine, Fate::kKilled,
                                                  false},
                                         Scenario{"StalledInRoute", Operation::kRoute, Fate::kStalled, true},
                                         Scenario{"StalledWhilePushing", Operation::kDispatch, Fate::kStalled, true},
                                         Scenario{"StalledWhileStaging", Operation::kDispatch, Fate::kStalled, false},
                                         Scenario{"StalledInCombine", Operation::kCombine, Fate::kStalled, true}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(
    SeveralNodes, LostRank,
    testing::Values(Scenario{"KilledInRoute2x3", Operation::kRoute, Fate::kKilled, true, 6, 3},
                    Scenario{"KilledInDispatch2x3", Operation::kDispatch, Fate::kKilled, true, 6, 3},
                    Scenario{"KilledInDispatchOfPlainRows3x2", Operation::kDispatch, Fate::kKilled, false, 6, 2},
                    Scenario{"KilledInCombine3x2", Operation::kCombine, Fate::kKilled, true, 6, 2},
                    Scenario{"KilledInRoute4x1", Operation::kRoute, Fate::kKilled, true, 4, 1},
                    Scenario{"KilledInDispatch4x1", Operation::kDispatch, Fate::kKilled, true, 4, 1},
                    Scenario{"KilledInCombine4x1", Operation::kCombine, Fate::kKilled, true, 4, 1},
                    Scenario{"StalledInRoute2x3", Operation::kRoute, Fate::kStalled, true, 6, 3},
                    Scenario{"StalledInDispatch2x3", Operation::kDispatch, Fate::kStalled, true, 6, 3},
                    Scenario{"StalledInDispatch3x2", Operation::kDispatch, Fate::kStalled, true, 6, 2},
                    Scenario{"StalledInCombine3x2", Operation::kCombine, Fate::kStalled, true, 6, 2},
                    Scenario{"StalledInDispatch4x1", Operation::kDispatch, Fate::kStalled, true, 4, 1}),
    name_of);

TEST(LeavingRank, ThreadsThatDestroyTheirGroupAreReportedAsLost) {
  run_ranks({.kind = RankKind::kThreads, .num_ranks = 3}, [](RankContext& context) {
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), {.backend = "cpu"});
    if (!context.expect_ok(group.status(), "create")) return;
    SmallExchange exchange(**group, true);
    context.expect_ok(exchange.run_and_verify(), "before");
    if (context.rank() == 1) return;  // leaves without waiting
    const Status status = exchange.route();
    context.expect_code(status, ErrorCode::kPeerLost, "after");
    context.expect(status.peer() == 1, status.to_string());
  });
}

TEST(LeavingRank, WhatItPublishedInItsLastRouteStaysForSlowerPeers) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4}, [](RankContext& context) {
    constexpr std::int64_t kTokens = 4096;
    std::vector<std::int64_t> ids(kTokens);
    for (std::int64_t token = 0; token < kTokens; ++token) ids[static_cast<std::size_t>(token)] = token % 4;
    for (int repeat = 0; repeat < 20; ++repeat) {
      Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), {.backend = "cpu"});
      if (!context.expect_ok(group.status(), "create")) return;
      const RouteInput in{ConstTensorView(ids.data(), DType::kInt64, {kTokens, 1}), {}};
      Result<Routing> routing = (*group)->route(in, {.num_experts = 4});
      group->reset();  // at once, while other ranks may still read the data this rank published
      if (!context.expect_ok(routing.status(), "route")) return;
      context.expect(routing->num_recv_rows() == kTokens, fmt::format("{} rows", routing->num_recv_rows()));
      const auto* source = static_cast<const std::int32_t*>(routing->source().data);
      for (std::int64_t row = 0; row < kTokens; ++row) {
        const std::int64_t expected = (row % (kTokens / 4)) * 4 + context.rank();
        if (!context.expect(source[row * 2 + 1] == expected, fmt::format("source of row {}", row))) return;
      }
    }
  });
}

TEST(LeavingRank, GroupsMayEndInAnyOrderAndBuffersOutliveThem) {
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = 4}, [](RankContext& context) {
    Buffer kept;
    {
      Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), {.backend = "cpu"});
      if (!context.expect_ok(group.status(), "create")) return;
      SmallExchange exchange(**group, true);
      context.expect_ok(exchange.run_and_verify(), "exchange");
      kept = (*group)->allocate(1 << 16).value();
    }
    static_cast<char*>(kept.data())[kept.size_bytes() - 1] = 1;
    context.expect(static_cast<char*>(kept.data())[kept.size_bytes() - 1] == 1, "the buffer is still there");
  });
}

}  // namespace
}  // namespace ferry::test
