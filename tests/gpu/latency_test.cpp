/// Latency mode in cases that need a GPU: graphs, halves at different places of the stream, memory of the group.
/// Results of calls are tested in tests/conformance.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

#include "gpu/full_gpu.hpp"
#include "gpu/latency_group.hpp"
#include "gpu/on_device.hpp"

namespace ferry::test {
namespace {

constexpr int kNumReplays = 4;

class LatencyGraphReplay : public testing::TestWithParam<bool> {};

TEST_P(LatencyGraphReplay, RoutesAnewWhatLiesInTheSameMemory) {
  for (const int num_ranks : {1, 2, 4}) {
    const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(num_ranks, kNumReplays);
    run_latency_group({.num_ranks = num_ranks}, cases, [&](RankContext& context, Group& group) {
      const RankStream stream(context);
      LatencyPair pair(context, group, cases.front());
      meet(context);
      CapturedGraph graph;
      graph.begin(stream.get());
      const Status status = pair.start(group, stream.get(), GetParam());
      graph.end();
      if (!context.expect_ok(status, "capturing")) return;
      graph.prepare();
      for (const PreparedCase& one : cases) {
        pair.refill(context, one);
        meet(context);  // no rank prepares or fills while others wait inside a kernel
        graph.launch();
        if (!context.expect_ok(group.wait(stream.get()), one.spec.name)) return;
        pair.expect_received(context);
      }
      meet(context);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Halves, LatencyGraphReplay, testing::Bool(),
                         [](const auto& test) { return test.param ? "apart" : "together"; });

/// Between the halves of two calls, a kernel that needs every multiprocessor gets them all: no kernel of Ferry is
/// resident.
TEST(LatencyHalves, HoldNoMultiprocessorBetweenThem) {
  constexpr int kNumRanks = 1;
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, kNumReplays);
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
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
    // The second call is received first.
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

/// The same before a peer has even made the call: a send half ends without the peer, and the receive half is not queued
/// yet.
TEST(LatencyHalves, LeaveTheGpuToOthersUntilThePeersCome) {
  constexpr int kNumRanks = 2;
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, 1);
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const RankStream stream(context);
    const OnDevice<std::uint32_t> words(std::vector<std::uint32_t>(2, 0));
    LatencyDispatchTensors tensors(context, group, cases.front(), 0);
    tensors.options.split = true;
    meet(context);
    if (context.rank() == 1) meet(context);  // until rank 0's kernel has had the whole GPU
    const auto routing = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream.get());
    context.expect_ok(routing.status(), "send half");
    if (context.rank() == 0) {
      const auto handle = static_cast<cudaStream_t>(stream.get().handle);
      context.expect(launch_full_gpu(static_cast<std::uint32_t*>(words.data()), handle) == cudaSuccess, "the launch");
      context.expect_ok(group.wait(stream.get()), "its end");
      std::vector<std::uint32_t> seen(2);
      words.read(seen);
      const auto blocks = static_cast<std::uint32_t>(full_gpu_blocks());
      context.expect(seen[1] == blocks, fmt::format("{} of {} blocks saw all others", seen[1], blocks));
      meet(context);
    }
    if (!routing.ok()) return;
    const Status status = finish(group, group.latency_receive(*routing, stream.get()), stream.get());
    if (!context.expect_ok(status, "receive half")) return;
    tensors.expect_received(context, "after the peer arrived: ");
    context.expect_ok(group.destroy(), "destroy");
  });
}

/// As many tokens as make a whole call use every multiprocessor, in each order, with weights of the dispatch or of the
/// combine.
std::vector<PreparedCase> full_cases(int num_ranks) {
  std::vector<PreparedCase> cases;
  for (const CombineOrder order : {CombineOrder::kExact, CombineOrder::kRankSums})
    for (const bool own_weights : {false, true}) {
      ExchangeCase one;
      one.name = fmt::format("order {}, own weights {}", static_cast<int>(order), own_weights);
      one.world = {.num_ranks = num_ranks, .num_topk = 4, .num_experts = 16, .max_tokens = 128};
      one.world.layout = Layout::kSlab;
      one.world.fixed_rows = 128 * num_ranks;
      one.dispatches = {{.hidden = 2048}};
      one.combines = {{.hidden = 2048, .weighted = true, .order = order, .own_weights = own_weights}};
      cases.push_back(prepare(one));
    }
  return cases;
}

/// Kernels of another library hold the multiprocessors that the group has reserved, and end only after the calls.
TEST(LatencyNeighbours, HoldTheReservedMultiprocessorsDuringACall) {
  constexpr int kNumRanks = 2;
  constexpr int kReserved = 32;
  constexpr std::uint32_t kEnd = 1000;
  const std::vector<PreparedCase> cases = full_cases(kNumRanks);
  run_gpu_ranks({.num_ranks = kNumRanks}, [&](RankContext& context) {
    GroupOptions options = latency_group_options(cases);
    options.num_reserved_sms = kReserved;
    const auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    const RankStream stream(context);
    const RankStream beside(context);
    for (const PreparedCase& one : cases)
      for (const bool split : {false, true}) {
        OnDevice<std::uint32_t> words(std::vector<std::uint32_t>(2, 0));
        LatencyPair pair(context, **group, one);
        meet(context);
        // Half of them, for ranks that share a GPU.
        context.expect(launch_holders(static_cast<std::uint32_t*>(words.data()), kReserved / kNumRanks, kEnd,
                                      static_cast<cudaStream_t>(beside.get().handle)) == cudaSuccess,
                       "the launch");
        Status status = pair.start(**group, stream.get(), split);
        if (status.ok()) status = (*group)->wait(stream.get());
        if (!context.expect_ok(status, one.spec.name)) return;
        copy_to_device(words.data(), &kEnd, sizeof(kEnd));
        cudaStreamSynchronize(static_cast<cudaStream_t>(beside.get().handle));
        std::vector<std::uint32_t> seen(2);
        words.read(seen);
        context.expect(seen[1] == kReserved / kNumRanks,
                       fmt::format("{}, split {}: {} blocks saw the end of the calls", one.spec.name, split, seen[1]));
        pair.expect_received(context);
      }
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

/// One rank asks for more than its group has memory for: all ranks get the error, and the next call succeeds.
TEST(LatencyRoom, OfTheGroupIsNamedWhereACallNeedsMore) {
  constexpr int kNumRanks = 2;
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, 1);
  run_latency_group({.num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const Stream stream = stream_of(group);
    {
      LatencyDispatchTensors tensors(context, group, cases.front(), 0);
      if (context.rank() == 1) tensors.options.max_tokens *= 100;
      const auto routing = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream);
      const Status status = finish(group, routing.status(), stream);
      context.expect_code(status, ErrorCode::kCapacity, "a call that needs more");
      context.expect(status.message().starts_with("rank 1: latency_dispatch: the group has ") &&
                         status.message().find("GroupOptions::latency_bytes") != std::string_view::npos,
                     status.to_string());
      tensors.expect_untouched(context, "a call that needs more: ");
    }
    check_latency_case(context, group, cases.front(), Halves::kTogether);
    context.expect_ok(group.destroy(), "destroy");
  });
}

}  // namespace
}  // namespace ferry::test
