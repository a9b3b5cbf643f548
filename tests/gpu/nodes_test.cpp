/// Exchanges and refusals of GPU ranks on several nodes, and the shapes of all tests of this suite.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>

#include "gpu/nodes_group.hpp"
#include "support/device_memory.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

TEST_P(GpuNodes, RandomExchangesAreTheOracles) {
  // Processes that share a GPU take turns in time slices.
  run_cases(random_cases(77, GetParam().kind == RankKind::kThreads ? 12 : 3));
}

/// Rows longer than a chunk of any ring, so that they are sent in slices, together with weights and scales.
TEST_P(GpuNodes, RowsLongerThanAChunk) {
  ExchangeCase spec;
  spec.name = "long rows";
  spec.world = {.num_topk = 3, .num_experts = 2 * GetParam().num_ranks() + 1, .max_tokens = 3};
  spec.dispatches = {{.hidden = 132000, .num_scales = 7}};
  spec.combines = {
      {.dtype = DType::kFloat32, .hidden = 66000, .weighted = true, .num_biases = 2, .return_weights = true}};
  run_cases({prepare_on_nodes(spec)});
}

/// The rail peers of a rank that arrives late at a dispatch see the delay in their wait times.
TEST_P(GpuNodes, ALateRankShowsInTheWaitsOfItsRailPeers) {
  constexpr std::chrono::milliseconds kDelay{50};
  const int late = GetParam().num_ranks() - 1;
  ExchangeCase spec;
  spec.name = "late rank";
  spec.world = {.num_topk = 3, .num_experts = 2 * GetParam().num_ranks() + 1, .max_tokens = 16};
  spec.memory = MemoryKind::kPlain;
  spec.dispatches = {{.hidden = 512}};
  const PreparedCase prepared = prepare_on_nodes(spec);
  run([&](RankContext& context, Group& group) {
    const RouteArguments arguments(context, group, prepared);
    const DispatchTensors tensors(context, group, prepared, 0);
    const Result<Routing> routing = group.route(arguments.input(), arguments.options(), stream_of(group));
    if (!context.expect_ok(routing.status(), "route")) return;
    context.expect_ok(group.wait(stream_of(group)), "route");
    const auto dispatch = [&] {
      return group.dispatch(*routing, tensors.in, tensors.out, stream_of(group), tensors.options);
    };
    const std::vector<std::int64_t> before = group.wait_times_ns();
    if (context.rank() != late) context.expect_ok(dispatch(), "dispatch");
    meet(context);
    if (context.rank() == late) {
      enqueue_delay(stream_of(group), kDelay);
      context.expect_ok(dispatch(), "dispatch");
    }
    context.expect_ok(group.wait(stream_of(group)), "dispatch");
    tensors.expect_received(context, "dispatch with a late rank: ");
    const std::vector<std::int64_t> after = group.wait_times_ns();
    const int ranks_per_node = GetParam().ranks_per_node;
    if (context.rank() == late || context.rank() % ranks_per_node != late % ranks_per_node) return;
    const auto idx = static_cast<std::size_t>(late);
    const std::int64_t waited_ns = after[idx] - before[idx];
    context.expect(waited_ns >= std::chrono::nanoseconds(kDelay).count() / 2,
                   fmt::format("{} ns for a rail peer that was {} ms late", waited_ns, kDelay.count()));
  });
}

/// More rows than the rings hold, so that chunks are reused.
TEST_P(GpuNodes, ManyTimesWhatTheRingsHold) {
  ExchangeCase spec;
  spec.name = "many rows";
  spec.world = {.num_topk = 4, .num_experts = 4 * GetParam().num_ranks(), .max_tokens = 2000};
  spec.dispatches = {{.hidden = 4096}};
  spec.combines = {{.hidden = 4096, .weighted = true}};
  run_cases({prepare_on_nodes(spec)});
}

class GpuNodesWithFaults : public GpuNodes {};

TEST_P(GpuNodesWithFaults, LateNodesAndAnyOrder) {
  const std::vector<PreparedCase> cases = random_cases(177, 6);
  net::LoopbackFaults faults;
  faults.scramble(12);
  run_cases(cases);
  EXPECT_GT(faults.counts().num_overtaken, 0U);
}

TEST_P(GpuNodesWithFaults, LatencyModeInAnyOrder) {
  const std::vector<PreparedCase> cases =
      latency_cases_of_equal_shapes(GetParam().num_ranks(), 3, true, GetParam().ranks_per_node);
  net::LoopbackFaults faults;
  faults.scramble(14);
  run(
      [&](RankContext& context, Group& group) {
        for (const PreparedCase& one : cases) {
          check_latency_case(context, group, one, Halves::kTogether);
          check_latency_case(context, group, one, Halves::kSplit);
        }
      },
      cases);
  EXPECT_GT(faults.counts().num_overtaken, 0U);
}

/// A call that one rank refuses is refused everywhere, in the same words, and the group remains usable.
TEST_P(GpuNodes, OneRefusalIsTheErrorOfAllRanks) {
  ExchangeCase spec;
  spec.world = {.num_topk = 2, .num_experts = 2 * GetParam().num_ranks(), .max_tokens = 8};
  spec.dispatches = {{.hidden = 64}};
  spec.combines = {{.hidden = 64}};
  const PreparedCase prepared = prepare_on_nodes(spec);
  for (int refusing = 0; refusing < GetParam().num_ranks(); ++refusing) {
    run([&](RankContext& context, Group& group) {
      const Stream stream = stream_of(group);
      const Routing routing = check_route(context, group, prepared);
      if (!routing.present()) return;
      DispatchTensors tensors(context, group, prepared, 0);
      if (context.rank() == refusing) tensors.in.x = ConstTensorView();
      Status status = group.dispatch(routing, tensors.in, tensors.out, stream, tensors.options);
      if (status.ok()) status = group.wait(stream);
      context.expect_code(status, ErrorCode::kInvalidArgument, "the refused dispatch");
      context.expect(status.peer() == refusing, fmt::format("blames {}: {}", status.peer(), status.to_string()));
      meet(context);
      check_case(context, group, prepared);
    });
  }
}

/// One rank routes while the others dispatch.
TEST_P(GpuNodes, DifferentCallsAreToldApart) {
  ExchangeCase spec;
  spec.world = {.num_topk = 2, .num_experts = 2 * GetParam().num_ranks(), .max_tokens = 8};
  spec.dispatches = {{.hidden = 64}};
  spec.combines = {{.hidden = 64}};
  const PreparedCase prepared = prepare_on_nodes(spec);
  run([&](RankContext& context, Group& group) {
    const Stream stream = stream_of(group);
    const Routing routing = check_route(context, group, prepared);
    if (!routing.present()) return;
    Status status;
    if (context.rank() == 0) {
      const RouteArguments arguments(context, group, prepared);
      status = group.route(arguments.input(), arguments.options(), stream).status();
    } else {
      DispatchTensors tensors(context, group, prepared, 0);
      status = group.dispatch(routing, tensors.in, tensors.out, stream, tensors.options);
      if (status.ok()) status = group.wait(stream);
    }
    context.expect_code(status, ErrorCode::kInvalidArgument, "the mixed call");
    context.expect(status.message().find("different calls") != std::string_view::npos, status.to_string());
    meet(context);
    check_case(context, group, prepared);
  });
}

class GpuNodesOfProcesses : public GpuNodes {};

/// Starts the ranks once for all cases: processes that share a GPU start slowly.
TEST_P(GpuNodesOfProcesses, AFewExchangesOfEachKind) {
  const std::vector<PreparedCase> rounds = random_cases(377, 2);
  const std::vector<PreparedCase> pairs =
      latency_cases_of_equal_shapes(GetParam().num_ranks(), 1, true, GetParam().ranks_per_node);
  run(
      [&](RankContext& context, Group& group) {
        for (const PreparedCase& one : rounds) check_case(context, group, one);
        for (const PreparedCase& one : pairs) {
          check_latency_case(context, group, one, Halves::kTogether);
          check_latency_case(context, group, one, Halves::kSplit);
        }
        for (const PreparedCase& one : rounds) check_case(context, group, one);
        const NetworkUsage usage = group.network_usage();
        context.expect(usage.transport == "ucx", usage.transport);
        context.expect(static_cast<int>(usage.rails.size()) == GetParam().num_nodes - 1,
                       "one entry for each rail peer");
      },
      pairs);
}

std::vector<NodesShape> emulated_shapes() { return {{2, 1}, {2, 2}, {4, 1}, {2, 4}, {3, 2}}; }

INSTANTIATE_TEST_SUITE_P(Shapes, GpuNodes, testing::ValuesIn(emulated_shapes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Shapes, GpuNodesWithFaults, testing::ValuesIn(emulated_shapes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Ucx, GpuNodes,
                         testing::Values(NodesShape{2, 1, RankKind::kProcesses, "ucx"},
                                         NodesShape{2, 2, RankKind::kProcesses, "ucx"},
                                         NodesShape{2, 1, RankKind::kThreads, "ucx"}),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Ucx, GpuNodesOfProcesses,
                         testing::Values(NodesShape{4, 1, RankKind::kProcesses, "ucx"},
                                         NodesShape{3, 2, RankKind::kProcesses, "ucx"},
                                         NodesShape{2, 4, RankKind::kProcesses, "ucx"}),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
