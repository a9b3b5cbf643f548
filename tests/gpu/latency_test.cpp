/// Latency mode where only a GPU can show it: graphs, halves in different places of the stream, ranks that are late or
/// lost. What the calls compute is in tests/conformance.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "gpu/full_gpu.hpp"
#include "gpu/gpu_group.hpp"
#include "gpu/on_device.hpp"
#include "support/latency_check.hpp"

namespace ferry::test {
namespace {

constexpr int kNumReplays = 4;

/// Cases of equal shapes with other ids.
std::vector<PreparedCase> equal_shapes(int num_ranks) {
  std::vector<PreparedCase> cases;
  for (int replay = 0; replay < kNumReplays; ++replay) {
    ExchangeCase one;
    one.name = fmt::format("replay {}", replay);
    one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 10, .max_tokens = 20};
    one.world.layout = Layout::kSlab;
    one.world.fixed_rows = 20 * num_ranks;
    one.world.pattern = static_cast<RoutingPattern>(replay * 3 % 5);
    one.world.seed = static_cast<std::uint64_t>(700 + replay);
    one.dispatches = {{.hidden = 1040, .quantize = Quantization::kFp8, .zero_padding = true}};
    one.combines = {{.hidden = 1040, .weighted = true}};
    cases.push_back(prepare(one));
  }
  return cases;
}

/// Runs `body` on every rank with a group that has memory for these cases.
void run_latency_group(int num_ranks, const std::vector<PreparedCase>& cases, std::int64_t timeout_ns,
                       const std::function<void(RankContext&, Group&)>& body) {
  run_gpu_ranks({.kind = RankKind::kThreads, .num_ranks = num_ranks}, [&](RankContext& context) {
    GroupOptions options = gpu_group_options();
    options.latency_bytes = latency_bytes_of("cuda", cases) + (std::size_t{1} << 20);
    if (timeout_ns > 0) options.timeout_ns = timeout_ns;
    auto group = Group::create(context.bootstrap(), options);
    if (context.expect_ok(group.status(), "Group::create")) body(context, **group);
  });
}

class LatencyGraphReplay : public testing::TestWithParam<bool> {};

TEST_P(LatencyGraphReplay, RoutesAnewWhatLiesInTheSameMemory) {
  const bool split = GetParam();
  for (const int num_ranks : {1, 2, 4}) {
    const std::vector<PreparedCase> cases = equal_shapes(num_ranks);
    run_latency_group(num_ranks, cases, 0, [&](RankContext& context, Group& group) {
      const OwnedStream stream;
      LatencyDispatchTensors dispatch(context, group, cases.front(), 0);
      LatencyCombineTensors combine(context, group, cases.front(), 0);
      dispatch.options.split = split;
      combine.options.split = split;
      meet(context);
      CapturedGraph graph;
      graph.begin(stream.get());
      const auto routing = group.latency_dispatch(dispatch.in, dispatch.out, dispatch.options, stream.get());
      Status status = routing.status();
      if (status.ok() && split) status = group.latency_receive(*routing, stream.get());
      if (status.ok()) status = group.latency_combine(*routing, combine.in, combine.out, stream.get(), combine.options);
      if (status.ok() && split) status = group.latency_receive(*routing, stream.get());
      graph.end();
      if (!context.expect_ok(status, "capturing")) return;
      graph.prepare();
      for (const PreparedCase& one : cases) {
        dispatch.refill(context, one, 0);
        combine.refill(context, one, 0);
        meet(context);  // nobody prepares or fills while others wait inside a kernel
        graph.launch();
        if (!context.expect_ok(group.wait(stream.get()), one.spec.name)) return;
        dispatch.expect_received(context, one.spec.name);
        combine.expect_received(context, one.spec.name);
      }
      meet(context);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Halves, LatencyGraphReplay, testing::Bool(),
                         [](const auto& test) { return test.param ? "apart" : "together"; });

/// Between the halves of two calls a kernel that needs every multiprocessor gets them all: nothing of ours is resident.
TEST(LatencyHalves, HoldNoMultiprocessorBetweenThem) {
  constexpr int kNumRanks = 1;
  const std::vector<PreparedCase> cases = equal_shapes(kNumRanks);
  run_latency_group(kNumRanks, cases, 0, [&](RankContext& context, Group& group) {
    const OwnedStream stream;
    const OnDevice<std::uint32_t> words(std::vector<std::uint32_t>(2, 0));
    std::array<LatencyDispatchTensors, 2> tensors = {LatencyDispatchTensors(context, group, cases[0], 0),
                                                     LatencyDispatchTensors(context, group, cases[1], 0)};
    std::vector<Routing> routings;
    for (LatencyDispatchTensors& one : tensors) {
      one.options.split = true;
      auto routing = group.latency_dispatch(one.in, one.out, one.options, stream.get());
      if (!context.expect_ok(routing.status(), "send half")) return;
      routings.push_back(std::move(*routing));
    }
    const auto handle = static_cast<cudaStream_t>(stream.get().handle);
    context.expect(launch_full_gpu(static_cast<std::uint32_t*>(words.data()), handle) == cudaSuccess, "the launch");
    // The second one first.
    Status status = group.latency_receive(routings[1], stream.get());
    if (status.ok()) status = group.latency_receive(routings[0], stream.get());
    if (status.ok()) status = group.wait(stream.get());
    if (!context.expect_ok(status, "receive halves")) return;
    std::vector<std::uint32_t> seen(2);
    words.read(seen);
    const auto blocks = static_cast<std::uint32_t>(full_gpu_blocks());
    context.expect(seen[1] == blocks, fmt::format("{} of {} blocks saw all others", seen[1], blocks));
    tensors[0].expect_received(context, "the first dispatch: ");
    tensors[1].expect_received(context, "the second dispatch: ");
    context.expect_ok(group.destroy(), "destroy");
  });
}

/// A rank that never makes the call: the others' send halves end, and their receive halves name it.
TEST(LatencyLostRank, IsNamedByTheReceiveHalf) {
  constexpr int kNumRanks = 3;
  constexpr int kLate = 2;
  const std::vector<PreparedCase> cases = equal_shapes(kNumRanks);
  run_latency_group(kNumRanks, cases, 2 * kNsPerSecond, [&](RankContext& context, Group& group) {
    if (context.rank() == kLate) {
      meet(context);
      return;
    }
    LatencyDispatchTensors tensors(context, group, cases.front(), 0);
    tensors.options.split = true;
    const auto routing = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
    if (context.expect_ok(routing.status(), "send half") &&
        context.expect_ok(group.wait(stream_of(group)), "its end")) {
      context.expect_ok(group.latency_receive(*routing, stream_of(group)), "launching the receive half");
      const Status status = group.wait(stream_of(group));
      context.expect_code(status, ErrorCode::kTimeout, "the receive half");
      context.expect(status.peer() == kLate, status.to_string());
    }
    meet(context);
  });
}

}  // namespace
}  // namespace ferry::test
