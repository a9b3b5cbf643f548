/// Calls of GPU ranks on several nodes in CUDA graphs, which are replayed.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/nodes_group.hpp"
#include "support/device_memory.hpp"

namespace ferry::test {
namespace {

/// Dispatch and combine recorded once, with an earlier Routing; each replay moves the current contents of the same
/// memory.
TEST_P(GpuNodes, RecordedCallsAreReplayed) {
  constexpr std::size_t kNumReplays = 4;
  for (const MemoryKind memory : {MemoryKind::kSymmetric, MemoryKind::kPlain}) {
    ExchangeCase spec;
    spec.name = "replays";
    spec.world = {.num_topk = 4, .num_experts = 3 * GetParam().num_ranks(), .max_tokens = 24};
    spec.memory = memory;
    spec.dispatches.assign(kNumReplays, {.hidden = 264, .num_scales = 3});
    spec.combines.assign(kNumReplays, {.hidden = 264, .weighted = true, .num_biases = 1, .return_weights = true});
    const PreparedCase prepared = prepare_on_nodes(spec);
    run([&](RankContext& context, Group& group) {
      const RankStream stream(context);
      // First outside the graph, as in programs that warm up: this allocates the forwarders' memory.
      const Routing routing = check_route(context, group, prepared);
      if (!routing.present()) return;
      check_dispatch(context, group, routing, prepared, 0);
      check_combine(context, group, routing, prepared, 0);
      DispatchTensors dispatch(context, group, prepared, 0);
      CombineTensors combine(context, group, prepared, 0);
      meet(context);
      CapturedGraph graph;
      graph.begin(stream.get());
      Status status = group.dispatch(routing, dispatch.in, dispatch.out, stream.get(), dispatch.options);
      if (status.ok()) status = group.combine(routing, combine.in, combine.out, stream.get(), combine.options);
      graph.end();
      if (!context.expect_ok(status, "capturing")) return;
      graph.prepare();
      for (std::size_t replay = 0; replay < kNumReplays; ++replay) {
        dispatch.refill(context, prepared, replay);
        combine.refill(context, prepared, replay);
        meet(context);  // no rank fills while others wait inside a kernel
        graph.launch();
        const std::string where = fmt::format("replay {}: ", replay);
        if (!context.expect_ok(group.wait(stream.get()), where)) return;
        dispatch.expect_received(context, where);
        combine.expect_received(context, where);
      }
      meet(context);
      check_case(context, group, prepared);
    });
  }
}

/// The same with a route of bounded rows and tokens in the graph: each replay routes again.
TEST_P(GpuNodes, RecordedRoutesAreReplayed) {
  constexpr std::int64_t kNumTokens = 24;
  for (const Layout layout : {Layout::kTokens, Layout::kExperts, Layout::kSlab}) {
    std::vector<PreparedCase> cases;
    for (std::uint64_t i = 0; i < 4; ++i) {
      ExchangeCase one;
      one.name = fmt::format("replay {}", i);
      one.world = {.num_topk = 4, .num_experts = 10, .max_tokens = kNumTokens, .layout = layout};
      one.world.pattern = static_cast<RoutingPattern>(i * 3 % 5);
      one.world.fixed_rows = kNumTokens * GetParam().num_ranks() * (layout == Layout::kExperts ? 4 : 1);
      one.world.seed = 901 + 2 * i;  // odd: tokens are bounded
      one.dispatches = {{.hidden = 264, .num_scales = 3, .zero_padding = true}};
      one.combines = {{.hidden = 264, .weighted = true, .num_biases = 1, .return_weights = true}};
      cases.push_back(prepare_on_nodes(one));
    }
    run([&](RankContext& context, Group& group) {
      const RankStream stream(context);
      check_case(context, group, cases.back());
      Round round(context, group, cases.front());
      round.keep_routing = true;
      meet(context);
      CapturedGraph graph;
      graph.begin(stream.get());
      const bool captured = round.start(context, group, stream.get());
      graph.end();
      if (!captured) return;
      graph.prepare();
      for (const PreparedCase& one : cases) {
        round.refill(context, one);
        meet(context);  // no rank fills while others wait inside a kernel
        graph.launch();
        if (!context.expect_ok(group.wait(stream.get()), one.spec.name)) return;
        round.expect_received(context);
        expect_routing(context, group, round.routing, one, Counts::kInMemory);
      }
      meet(context);
    });
  }
}

/// A dispatch of latency mode and a combine, whole and in halves, recorded once: each replay routes again.
TEST_P(GpuNodes, RecordedLatencyCallsAreReplayed) {
  const std::vector<PreparedCase> cases =
      latency_cases_of_equal_shapes(GetParam().num_ranks(), 4, true, GetParam().ranks_per_node);
  for (const bool split : {false, true}) {
    run(
        [&](RankContext& context, Group& group) {
          const RankStream stream(context);
          LatencyPair pair(context, group, cases.back());
          // First outside the graph, as in programs that warm up: this allocates the forwarders' memory.
          if (!context.expect_ok(pair.start(group, stream.get(), split), "outside the graph")) return;
          if (!context.expect_ok(group.wait(stream.get()), "outside the graph")) return;
          pair.expect_received(context);
          meet(context);
          CapturedGraph graph;
          graph.begin(stream.get());
          const Status captured = pair.start(group, stream.get(), split);
          graph.end();
          if (!context.expect_ok(captured, "capturing")) return;
          graph.prepare();
          for (const PreparedCase& one : cases) {
            pair.refill(context, one);
            meet(context);  // no rank fills while others wait inside a kernel
            graph.launch();
            if (!context.expect_ok(group.wait(stream.get()), one.spec.name)) return;
            pair.expect_received(context);
          }
          meet(context);
          check_latency_case(context, group, cases.front(), Halves::kSplit);
        },
        cases);
  }
}

/// A dispatch is sent outside a graph, and a graph receives it and combines.
TEST_P(GpuNodes, AGraphReceivesWhatWasSentOutside) {
  const std::vector<PreparedCase> cases =
      latency_cases_of_equal_shapes(GetParam().num_ranks(), 2, false, GetParam().ranks_per_node);
  run(
      [&](RankContext& context, Group& group) {
        const RankStream stream(context);
        LatencyPair pair(context, group, cases.front());
        if (!context.expect_ok(pair.start(group, stream.get(), true), "outside the graph")) return;
        if (!context.expect_ok(group.wait(stream.get()), "outside the graph")) return;
        meet(context);
        pair.refill(context, cases.back());
        meet(context);  // no rank fills while others wait inside a kernel
        if (!context.expect_ok(pair.send(group, stream.get()), "sending")) return;
        meet(context);  // making a graph may wait for kernels, and those for ranks that have not sent
        CapturedGraph graph;
        graph.begin(stream.get());
        const Status captured = pair.finish(group, stream.get());
        graph.end();
        if (!context.expect_ok(captured, "capturing")) return;
        graph.prepare();
        meet(context);
        graph.launch();
        if (!context.expect_ok(group.wait(stream.get()), "replay")) return;
        pair.expect_received(context);
        meet(context);
        check_latency_case(context, group, cases.front(), Halves::kSplit);
      },
      cases);
}

}  // namespace
}  // namespace ferry::test
