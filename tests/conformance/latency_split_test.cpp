#include <fmt/format.h>

#include <array>
#include <functional>
#include <optional>
#include <string_view>

#include "conformance/latency_conformance.hpp"

/// Split calls of latency mode: several in flight, received in any order, with any calls between the halves.

namespace ferry::test {
namespace {

/// Deadline for all ranks to reach a point of a test.
constexpr std::int64_t kMeetTimeoutNs = 40 * kNsPerSecond;

/// Waits, without the group, until every rank has arrived.
bool meet(RankContext& context) {
  return context.expect_ok(context.bootstrap()->all_gather({}, kMeetTimeoutNs).status(), "meet");
}

class LatencySplit : public LatencyConformance {
 protected:
  using Step = bool (LatencyExchange::*)();

  /// Two micro-batches of different shapes, each with its own Routing.
  std::vector<PreparedCase> two_batches(int num_ranks) {
    ExchangeCase first = small_latency_case(num_ranks, 51);
    ExchangeCase second = small_latency_case(num_ranks, 52);
    second.world.num_topk = 5;
    second.world.max_tokens = 11;
    second.spare_max_tokens = kManyTokens;
    second.dispatches = {{.hidden = 272, .quantize = Quantization::kFp8, .zero_padding = true}};
    second.combines = {{.dtype = DType::kFloat32, .weighted = true, .order = CombineOrder::kRankSums},
                       {.weighted = true}};
    second.slab_view = true;
    return prepare_latency({{first, second}});
  }
};

/// Steps of a rank with two micro-batches, one letter each: A and B send their batch or, in brackets, receive it. The
/// dispatches come before the combines.
constexpr std::array<std::string_view, 6> kInterleavings = {
    "AB(B)(A)AB(A)(B)", "AB(A)(B)AB(B)(A)", "A(A)B(B)A(A)B(B)",
    "AB(A)(B)A(A)B(B)", "A(A)B(B)AB(B)(A)", "AB(B)(A)AB(B)(A)",
};

/// Follows the steps. Returns false after an error, which is reported.
bool follow(std::string_view steps, LatencyExchange& a, LatencyExchange& b) {
  std::array<bool, 2> dispatched = {false, false};
  bool receives = false;
  for (const char step : steps) {
    if (step == '(' || step == ')') {
      receives = step == '(';
      continue;
    }
    const std::size_t which = step == 'A' ? 0 : 1;
    LatencyExchange& exchange = which == 0 ? a : b;
    bool ok = false;
    if (receives) {
      ok = exchange.receive();
    } else {
      ok = dispatched[which] ? exchange.send_combine(which) : exchange.send_dispatch();
      dispatched[which] = true;
    }
    if (!ok) return false;
  }
  return true;
}

/// Tests the receive half alone, to tell a receive half that does nothing from a wrong exchange.
TEST_P(LatencySplit, TheReceiveHalfBringsTheRows) {
  constexpr int kNumRanks = 2;
  const std::vector<PreparedCase> batches = two_batches(kNumRanks);
  // Outlives the group, which may write rows not received yet when it ends.
  std::array<std::optional<LatencyExchange>, kNumRanks> exchanges;
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    auto& exchange = exchanges[static_cast<std::size_t>(context.rank())];
    exchange.emplace(context, group, batches[0]);
    if (exchange->send_dispatch()) exchange->receive();
  });
}

TEST_P(LatencySplit, InterleavingsOfTwoMicroBatches) {
  for (const int num_ranks : {1, 2, 4}) {
    const std::vector<PreparedCase> batches = two_batches(num_ranks);
    run_with_group(num_ranks, [&](RankContext& context, Group& group) {
      for (const std::string_view steps : kInterleavings) {
        LatencyExchange a(context, group, batches[0]);
        LatencyExchange b(context, group, batches[1]);
        if (!follow(steps, a, b)) return;
      }
    });
  }
}

/// Send halves have one order on all ranks: A, B, A, B. Receive halves may differ.
TEST_P(LatencySplit, AnotherInterleavingOnEveryRank) {
  for (const int num_ranks : {2, 4}) {
    const std::vector<PreparedCase> batches = two_batches(num_ranks);
    run_with_group(num_ranks, [&](RankContext& context, Group& group) {
      for (std::size_t round = 0; round < 4 * kInterleavings.size(); ++round) {
        LatencyExchange a(context, group, batches[0]);
        LatencyExchange b(context, group, batches[1]);
        const std::size_t mine = (round + static_cast<std::size_t>(context.rank()) * (1 + round / 6));
        if (!follow(kInterleavings[mine % kInterleavings.size()], a, b)) return;
      }
    });
  }
}

/// Each rank makes its calls only after those of the rank before it have returned: a send half that waited for another
/// rank would never return.
TEST_P(LatencySplit, ASendHalfReturnsBeforeAnyPeerHasMadeTheCall) {
  constexpr int kNumRanks = 3;
  const std::vector<PreparedCase> batches = two_batches(kNumRanks);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const auto one_after_another = [&](const std::function<bool()>& send) {
      for (int turn = 0; turn < kNumRanks; ++turn) {
        // A rank that failed still meets the others, so that they do not wait in vain.
        if (turn == context.rank()) context.expect(send(), "a send half failed");
        if (!meet(context)) return false;
      }
      return true;
    };
    LatencyExchange a(context, group, batches[0]);
    LatencyExchange b(context, group, batches[1]);
    if (!one_after_another([&] { return a.send_dispatch() && b.send_dispatch(); })) return;
    if (!b.receive() || !a.receive()) return;
    if (!one_after_another([&] { return b.send_combine(1) && a.send_combine(0); })) return;
    if (b.receive()) a.receive();
  });
}

/// Calls of every kind may be made while others are in flight. On the first rank halves are far apart; the other ranks
/// receive each call at once.
TEST_P(LatencySplit, OtherCallsBetweenTheHalves) {
  constexpr int kNumRanks = 3;
  const std::vector<PreparedCase> batches = two_batches(kNumRanks);
  std::mt19937_64 random(61);
  std::vector<PreparedCase> others;
  for (int i = 0; i < 6; ++i) others.push_back(prepare(draw_case(random, kNumRanks)));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const bool far_apart = context.rank() == 0;
    std::vector<LatencyExchange*> in_flight;
    const auto sent = [&](LatencyExchange& exchange, bool ok) {
      if (ok && far_apart) in_flight.push_back(&exchange);
      return ok && (far_apart || exchange.receive());
    };
    const auto receive_all = [&] {
      bool ok = true;
      for (LatencyExchange* exchange : in_flight) ok = ok && exchange->receive();
      in_flight.clear();
      return ok;
    };
    LatencyExchange a(context, group, batches[0]);
    LatencyExchange b(context, group, batches[1]);
    LatencyExchange c(context, group, batches[0]);
    const Routing old = check_route(context, group, others[0]);
    if (!sent(a, a.send_dispatch())) return;
    check_case(context, group, others[1]);
    if (!sent(b, b.send_dispatch())) return;
    check_dispatch(context, group, old, others[0], 0);
    check_latency_case(context, group, batches[1], Halves::kTogether);
    if (!receive_all()) return;
    if (!sent(a, a.send_combine(0))) return;
    check_case(context, group, others[2]);
    if (!sent(b, b.send_combine(0)) || !c.dispatch()) return;
    check_combine(context, group, old, others[0], 0);
    if (!receive_all() || !c.combine(1)) return;
    check_case(context, group, others[3]);
  });
}

/// A whole call may be made on a Routing while other Routings have calls in flight, and the order of receiving is free.
TEST_P(LatencySplit, DispatchesAndCombinesInFlightTogether) {
  constexpr int kNumRanks = 2;
  const std::vector<PreparedCase> batches = two_batches(kNumRanks);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange a(context, group, batches[0]);
    LatencyExchange b(context, group, batches[1]);
    LatencyExchange c(context, group, batches[1]);
    LatencyExchange d(context, group, batches[0]);
    if (!a.dispatch() || !b.dispatch()) return;
    if (!a.send_combine(1) || !c.send_dispatch() || !b.send_combine(0) || !d.send_dispatch()) return;
    if (!d.receive() || !b.receive() || !c.receive() || !a.receive()) return;
    if (!d.combine(0) || !c.combine(1) || !b.combine(1)) return;
    a.combine(0);
  });
}

/// A program that stops between the halves, for example because of an exception, drops the Routing.
TEST_P(LatencySplit, ARoutingDroppedBeforeItIsReceivedHarmsNoRank) {
  constexpr int kNumRanks = 3;
  const std::vector<PreparedCase> batches = two_batches(kNumRanks);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const auto drop_one = [&](LatencyDispatchTensors& tensors) {
      tensors.options.split = true;
      const auto sent = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
      return context.expect_ok(sent.status(), "a dispatch whose Routing is dropped");
    };
    {
      // One rank drops its Routing while the others receive theirs.
      LatencyDispatchTensors tensors(context, group, batches[0], 0);
      LatencyExchange exchange(context, group, batches[0]);
      const bool drops = context.rank() == 1;
      if (drops ? !drop_one(tensors) : !(exchange.send_dispatch() && exchange.receive())) return;
      check_latency_case(context, group, batches[1], Halves::kTogether);
    }
    if (on_gpus()) {
      // The dropped call stays in flight, which leaves room for one more.
      check_latency_case(context, group, batches[1], Halves::kSplit);
      return;
    }
    // More calls than may be in flight.
    for (int round = 0; round < kMaxLatencyCallsInFlight + 2; ++round) {
      LatencyDispatchTensors tensors(context, group, batches[0], 0);
      if (!drop_one(tensors)) return;
      check_latency_case(context, group, batches[1], round % 2 == 0 ? Halves::kTogether : Halves::kSplit);
      tensors.expect_received(context, "after the next call that all ranks made: ");
    }
    LatencyExchange a(context, group, batches[0]);
    LatencyExchange b(context, group, batches[1]);
    if (!a.dispatch() || !b.dispatch()) return;
    for (int round = 0; round < kMaxLatencyCallsInFlight + 2; ++round) {
      LatencyExchange c(context, group, batches[0]);
      if (!c.dispatch() || !c.send_combine(0)) return;
      // The tensors live as long as the call may access them.
      if (!a.combine(1)) return;
    }
    if (b.combine(1) && a.send_combine(0) && b.send_combine(0) && b.receive()) a.receive();
  });
}

/// A group ends normally with calls in flight, and no rank waits for those calls.
TEST_P(LatencySplit, AGroupEndsWithCallsInFlight) {
  constexpr int kNumRanks = 3;
  const std::vector<PreparedCase> batches = two_batches(kNumRanks);
  for (const bool destroys : {true, false}) {
    run_on_ranks(kNumRanks, [&](RankContext& context) {
      auto group = Group::create(context.bootstrap(), group_options(context));
      if (!context.expect_ok(group.status(), "Group::create")) return;
      LatencyExchange a(context, **group, batches[0]);
      LatencyExchange b(context, **group, batches[1]);
      if (!a.dispatch() || !a.send_combine(0) || !b.send_dispatch()) return;
      // Other ranks would notice a rank that left without destroy only in their next call; none follows here.
      if (destroys) {
        context.expect_ok((*group)->destroy(), "destroy");
        context.expect_code((*group)->latency_receive(b.routing()), ErrorCode::kInvalidArgument, "after destroy");
      }
      // The tensors end first, then the group; Routings may outlive both.
      const Routing kept = b.routing();
      group->reset();
      context.expect(kept.num_topk() == batches[1].world.num_topk, "the Routing outlives its group");
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencySplit, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
