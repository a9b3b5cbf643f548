#include <fmt/format.h>

#include <array>
#include <string>
#include <string_view>

#include "conformance/latency_conformance.hpp"

/// Calls of latency mode at the wrong time, or on the wrong Routing or slab.

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;

class LatencyState : public LatencyConformance {
 protected:
  PreparedCase good_case() { return prepare_latency(small_latency_case(kNumRanks)); }

  /// Expects a refusal that involves only this rank: the others may make any calls meanwhile.
  static void expect_refused_alone(RankContext& context, const Status& status, std::string_view words) {
    const std::string expected = fmt::format("kInvalidArgument: {}", words);
    context.expect(status.to_string().find(expected) != std::string::npos,
                   fmt::format("expected \"{}\" in \"{}\"", expected, status.to_string()));
  }

  static Result<Routing> send(Group& group, LatencyDispatchTensors& tensors) {
    tensors.options.split = true;
    return group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
  }
};

TEST_P(LatencyState, ReceivingWhatWasNotSent) {
  const PreparedCase good = good_case();
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), group_options(context));
    auto other = Group::create(context.bootstrap(), group_options(context));
    if (!context.expect_ok(group.status(), "group") || !context.expect_ok(other.status(), "other group")) return;
    Group& here = **group;
    const auto receive = [&](const Routing& routing) { return here.latency_receive(routing, stream_of(here)); };
    const Routing routed = check_route(context, here, good);
    LatencyExchange whole(context, here, good);
    LatencyExchange split(context, here, good);
    LatencyExchange elsewhere(context, **other, good);
    if (!whole.dispatch() || !split.send_dispatch() || !elsewhere.send_dispatch()) return;

    expect_refused_alone(context, receive({}), "latency_receive: the Routing is empty");
    expect_refused_alone(context, receive(routed), "latency_receive: the Routing was not made by latency_dispatch");
    expect_refused_alone(context, receive(elsewhere.routing()),
                         "latency_receive: the Routing was made by another group");
    expect_refused_alone(context, receive(whole.routing()), "latency_receive: nothing is to be received on this");
    if (!split.receive()) return;
    expect_refused_alone(context, receive(split.routing()), "latency_receive: nothing is to be received on this");
    if (!split.send_combine(0) || !split.receive()) return;
    expect_refused_alone(context, receive(split.routing()), "latency_receive: nothing is to be received on this");
    if (!split.combine(1)) return;
    expect_refused_alone(context, receive(split.routing()), "latency_receive: nothing is to be received on this");
    if (!uses_device(here)) {
      int no_stream = 0;
      expect_refused_alone(context, here.latency_receive(elsewhere.routing(), Stream{&no_stream}),
                           "latency_receive: the stream is");
    }

    if (!elsewhere.receive()) return;
    LatencyDispatchTensors dispatch(context, here, good, 0);
    context.expect_ok(here.destroy(), "destroy");
    context.expect_ok((*other)->destroy(), "destroy the other group");
    expect_refused_alone(context, receive(split.routing()), "latency_receive: this group was destroyed");
    expect_refused_alone(context, send(here, dispatch).status(), "latency_dispatch: this group was destroyed");
    expect_refused_alone(context, here.latency_combine(split.routing(), {}, {}),
                         "latency_combine: this group was destroyed");
  });
}

/// One rank's Routing is not ready: all ranks are refused, and continue.
TEST_P(LatencyState, CombiningOnTheWrongRouting) {
  const PreparedCase good = good_case();
  run_on_ranks(kNumRanks, [&](RankContext& context) {
    auto group = Group::create(context.bootstrap(), group_options(context));
    auto other = Group::create(context.bootstrap(), group_options(context));
    if (!context.expect_ok(group.status(), "group") || !context.expect_ok(other.status(), "other group")) return;
    Group& here = **group;
    const Routing routed = check_route(context, here, good);
    LatencyExchange a(context, here, good);
    LatencyExchange b(context, here, good);
    LatencyExchange elsewhere(context, **other, good);
    if (!elsewhere.dispatch() || !a.send_dispatch() || !b.dispatch()) return;
    const bool bad = context.rank() == 1;
    const auto refused = [&](const Routing& bad_routing, std::string_view words) {
      for (const bool split : {false, true}) {
        LatencyCombineTensors tensors(context, here, good, 0);
        tensors.options.split = split;
        const Status status = call_combine(here, bad ? bad_routing : b.routing(), tensors);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, std::string(words),
                            fmt::format("rank 1: latency_combine: {}", words));
        tensors.expect_untouched(context, "a refused combine: ");
      }
    };
    refused({}, "the Routing is empty");
    refused(routed, "the Routing was not made by latency_dispatch");
    refused(elsewhere.routing(), "the Routing was made by another group");
    refused(a.routing(), "the Routing's dispatch is sent and not received; call latency_receive on it first");
    if (!a.receive() || !a.send_combine(1)) return;
    refused(a.routing(), "a combine on this Routing is sent and not received; call latency_receive on it first");
    if (!a.receive() || !b.combine(0) || !a.combine(0)) return;
    context.expect_ok((*other)->destroy(), "destroy the other group");
    context.expect_ok(here.destroy(), "destroy");
  });
}

/// Other calls on a Routing are refused until its dispatch is received.
TEST_P(LatencyState, OtherCallsOnARoutingThatIsNotReceived) {
  ExchangeCase spec = small_latency_case(kNumRanks);
  const PreparedCase good = prepare_latency(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange a(context, group, good);
    if (!a.send_dispatch()) return;
    DispatchTensors dispatch(context, group, good, 0);
    CombineTensors combine(context, group, good, 0);
    const Stream stream = stream_of(group);
    const auto refused = [&](const char* call, const Status& status) {
      const auto words = [call](int rank) {
        return fmt::format("rank {}: {}: the Routing's dispatch is sent and not received", rank, call);
      };
      expect_own_refusals(context, group, finish(group, status), {ErrorCode::kInvalidArgument, call, words});
    };
    refused("dispatch", group.dispatch(a.routing(), dispatch.in, dispatch.out, stream, dispatch.options));
    refused("combine", group.combine(a.routing(), combine.in, combine.out, stream, combine.options));
    expect_refused_alone(context, group.channel_tables(a.routing(), 1, {}, stream),
                         "channel_tables: the Routing's dispatch is sent and not received");
    dispatch.expect_untouched(context, "a refused dispatch: ");
    combine.expect_untouched(context, "a refused combine: ");
    if (a.receive()) a.combine(0);
  });
}

TEST_P(LatencyState, TooManyInFlight) {
  const PreparedCase good = good_case();
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange a(context, group, good);
    LatencyExchange b(context, group, good);
    LatencyExchange c(context, group, good);
    const bool bad = context.rank() == 1;
    if (!a.send_dispatch() || !b.send_dispatch()) return;
    // The other ranks received theirs, and may send one more.
    if (!bad && !a.receive()) return;
    {
      LatencyDispatchTensors third(context, group, good, 0);
      third.options.split = true;
      expect_same_refusal(context, call_dispatch(group, third), ErrorCode::kInvalidArgument, "a third dispatch",
                          "rank 1: latency_dispatch: 2 split calls are sent and not received, expected fewer than 2; "
                          "call latency_receive on their Routings first");
      third.expect_untouched(context, "a third dispatch: ");
    }
    // A call that is not split is allowed.
    if (!c.dispatch() || (bad && !a.receive()) || !b.receive()) return;

    if (!a.send_combine(0) || !b.send_combine(1) || (!bad && !b.receive())) return;
    {
      LatencyCombineTensors third(context, group, good, 0);
      third.options.split = true;
      expect_same_refusal(context, call_combine(group, c.routing(), third), ErrorCode::kInvalidArgument,
                          "a third combine", "rank 1: latency_combine: 2 split calls are sent and not received");
      third.expect_untouched(context, "a third combine: ");
    }
    if (!c.combine(0) || !a.receive() || (bad && !b.receive())) return;
    if (c.send_combine(1)) c.receive();
  });
}

TEST_P(LatencyState, ASlabThatIsInFlight) {
  ExchangeCase spec = small_latency_case(kNumRanks);
  spec.world.counts = TokenCounts::kEven;
  const PreparedCase good = prepare_latency(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const bool bad = context.rank() == 1;
    for (const bool split : {false, true}) {
      LatencyDispatchTensors first(context, group, good, 0);
      LatencyDispatchTensors second(context, group, good, 0);
      const LatencyDispatchOutput apart = second.out;
      const Result<Routing> routing = send(group, first);
      if (!context.expect_ok(routing.status(), "send half")) return;
      const auto refused = [&](std::string_view mine, std::string_view theirs, const LatencyDispatchOutput& out) {
        second.options.split = split;
        second.out = bad ? out : apart;
        const Status status = call_dispatch(group, second);
        const std::string what = fmt::format("{} over {}", mine, theirs);
        expect_same_refusal(context, status, ErrorCode::kInvalidArgument, what,
                            fmt::format("rank 1: latency_dispatch: output {} (addresses ", mine));
        context.expect(status.message().find(fmt::format("shares memory with output {} of a dispatch that is not "
                                                         "received",
                                                         theirs)) != std::string_view::npos,
                       fmt::format("{}: {}", what, status.to_string()));
        second.out = apart;
        second.expect_untouched(context, what + ": ");
      };
      LatencyDispatchOutput out = apart;
      out.x = first.out.x;
      refused("x", "x", out);
      out.x.data = static_cast<std::byte*>(first.out.x.data) + (first.out.x.extent(0) - 1) * 64;
      refused("x", "x", out);
      out = apart;
      out.scales = first.out.scales;
      refused("scales", "scales", out);
      out.scales.data = first.out.x.data;
      refused("scales", "x", out);
      if (!context.expect_ok(finish(group, group.latency_receive(*routing, stream_of(group))), "receive")) return;
      first.expect_received(context, "the slab that was in flight: ");
      // The slab may be used again.
      second.options.split = split;
      second.out = first.out;
      context.expect_ok(call_dispatch(group, second), "into the same slab");
    }
    check_latency_case(context, group, good, Halves::kSplit);
  });
}

/// A peer refused its part of a split dispatch: the Routing of the other ranks is unusable.
TEST_P(LatencyState, ARoutingWhoseDispatchFailed) {
  ExchangeCase spec = small_latency_case(kNumRanks);
  spec.world.counts = TokenCounts::kEven;
  const PreparedCase good = prepare_latency(spec);
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const bool bad = context.rank() == 1;
    LatencyDispatchTensors tensors(context, group, good, 0);
    if (bad) tensors.in.x.data = tensors.in.topk_idx.data = nullptr;
    const Result<Routing> sent = send(group, tensors);
    const Stream stream = stream_of(group);
    Routing failed;
    if (sent.ok()) failed = *sent;
    context.expect(failed.present() != bad, "the send half finds this rank's mistakes, not a peer's");
    const Status status = failed.present() ? group.latency_receive(failed, stream) : sent.status();
    expect_same_refusal(context, finish(group, status), ErrorCode::kInvalidArgument, "no x",
                        "rank 1: latency_dispatch");
    tensors.expect_untouched(context, "a refused dispatch: ");
    if (failed.present()) {
      expect_refused_alone(context, group.latency_receive(failed, stream),
                           "latency_receive: the Routing's dispatch failed when it was received");
      expect_refused_alone(context, group.channel_tables(failed, 1, {}, stream),
                           "channel_tables: the Routing's dispatch failed when it was received");
    }
    LatencyCombineTensors combine(context, group, good, 0);
    const Status combined = call_combine(group, failed, combine);
    const auto words = [](int rank) {
      return rank == 1
                 ? "rank 1: latency_combine: the Routing is empty"
                 : fmt::format("rank {}: latency_combine: the Routing's dispatch failed when it was received", rank);
    };
    expect_own_refusals(context, group, combined, {ErrorCode::kInvalidArgument, "combine on it", words});
    combine.expect_untouched(context, "combine on it: ");
    check_latency_case(context, group, good, Halves::kSplit);
  });
}

/// Call that rank 1 makes while the others call latency_dispatch.
enum class OtherCall { kCombine, kSplitCombine, kRoute };

/// Makes the calls and returns this rank's status. The others' call is split if rank 1's is.
Status make_different_calls(RankContext& context, Group& group, const LatencyExchange& done, OtherCall other) {
  const PreparedCase& prepared = done.prepared();
  const RouteArguments route(context, group, prepared);
  LatencyDispatchTensors dispatch(context, group, prepared, 0);
  LatencyCombineTensors combine(context, group, prepared, 0);
  dispatch.options.split = combine.options.split = other == OtherCall::kSplitCombine;
  Status status;
  if (context.rank() != 1) {
    status = call_dispatch(group, dispatch);
  } else if (other == OtherCall::kRoute) {
    status = finish(group, group.route(route.input(), route.options(), stream_of(group)).status());
  } else {
    status = call_combine(group, done.routing(), combine);
  }
  if (status.code() == ErrorCode::kInvalidArgument) {
    dispatch.expect_untouched(context, "different calls: ");
    combine.expect_untouched(context, "different calls: ");
  }
  return status;
}

constexpr std::array<OtherCall, 3> kOtherCalls = {OtherCall::kCombine, OtherCall::kSplitCombine, OtherCall::kRoute};

std::string_view name_of(OtherCall call) { return call == OtherCall::kRoute ? "route" : "latency_combine"; }

/// Kernels of different kinds of calls wait for each other until the deadline, as for an absent rank. The records of
/// the hosts then show the calls of one node.
void expect_late(RankContext& context, const Status& status, OtherCall other, bool over_nodes) {
  context.expect_code(status, ErrorCode::kTimeout, "different calls");
  if (over_nodes) return;
  const std::string text = status.to_string();
  const std::string dispatched = "called latency_dispatch";
  const std::string called = fmt::format("rank 1 called {}", name_of(other));
  context.expect(text.find(dispatched) != std::string::npos && text.find(called) != std::string::npos, text);
}

/// Ranks that make different calls get an error that shows both. If all compare their calls first, the next calls match
/// again.
TEST_P(LatencyState, DifferentCalls) {
  const PreparedCase good = good_case();
  if (on_gpus()) {
    // Such groups find the mistake only after this deadline.
    constexpr std::int64_t kTimeoutNs = 3 * kNsPerSecond;
    for (const OtherCall other : kOtherCalls) {
      run_on_ranks(kNumRanks, [&](RankContext& context) {
        GroupOptions options = group_options(context);
        options.timeout_ns = kTimeoutNs;
        auto group = Group::create(context.bootstrap(), options);
        if (!context.expect_ok(group.status(), "Group::create")) return;
        LatencyExchange a(context, **group, good);
        if (!a.dispatch()) return;
        expect_late(context, make_different_calls(context, **group, a, other), other, GetParam().several_nodes);
        context.expect_ok(context.bootstrap()->all_gather({}, 10 * kTimeoutNs).status(), "meet after the error");
      });
    }
    return;
  }
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyExchange a(context, group, good);
    if (!a.dispatch()) return;
    for (const OtherCall other : kOtherCalls) {
      const Status status = make_different_calls(context, group, a, other);
      const std::string words =
          fmt::format("ranks made different calls: rank 0 called latency_dispatch, rank 1 called {}", name_of(other));
      expect_same_refusal(context, status, ErrorCode::kInvalidArgument, "different calls", words);
    }
    if (!a.combine(0)) return;
    const Routing routed = check_route(context, group, good);
    if (!routed.present()) return;
    check_dispatch(context, group, routed, good, 0);
    check_combine(context, group, routed, good, 0);
    check_latency_case(context, group, good, Halves::kTogether);
    check_latency_case(context, group, good, Halves::kSplit);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyState, ::testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
