/// Groups of GPU ranks on several nodes, emulated on one host. Ranks are threads, with the loopback engine or UCX as
/// the network between them, or processes, with UCX.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <random>

#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"
#include "support/device_memory.hpp"
#include "support/loopback_faults.hpp"
#include "support/process_usage.hpp"

namespace ferry::test {
namespace {

struct Shape {
  int num_nodes;
  int ranks_per_node;
  RankKind kind = RankKind::kThreads;
  const char* transport = "loopback";
  int num_ranks() const { return num_nodes * ranks_per_node; }
};

std::string describe(const Shape& shape) {
  return fmt::format("{}x{}_{}_{}", shape.num_nodes, shape.ranks_per_node, shape.transport, kind_name(shape.kind));
}
void PrintTo(const Shape& shape, std::ostream* out) { *out << describe(shape); }

GroupOptions options_of(const Shape& shape) {
  GroupOptions options = gpu_group_options();
  options.ranks_per_node = shape.ranks_per_node;
  options.transport = shape.transport;
  return options;
}

class GpuNodes : public testing::TestWithParam<Shape> {
 protected:
  static PreparedCase prepare_on_nodes(ExchangeCase spec) {
    spec.world.num_ranks = GetParam().num_ranks();
    spec.world.ranks_per_node = GetParam().ranks_per_node;
    return prepare(spec);
  }
  static std::vector<PreparedCase> random_cases(std::uint64_t seed, int count) {
    std::mt19937_64 random(seed + static_cast<std::uint64_t>(GetParam().num_ranks()));
    std::vector<PreparedCase> cases;
    for (int i = 0; i < count; ++i) cases.push_back(prepare_on_nodes(draw_case(random, GetParam().num_ranks())));
    return cases;
  }
  /// `latency_cases`: cases of latency mode that the group makes.
  static void run(const std::function<void(RankContext&, Group&)>& body,
                  const std::vector<PreparedCase>& latency_cases = {}) {
    run_gpu_ranks({GetParam().kind, GetParam().num_ranks()}, [&](RankContext& context) {
      GroupOptions options = options_of(GetParam());
      if (!latency_cases.empty()) options.latency_bytes = latency_bytes_of("cuda", latency_cases);
      auto group = Group::create(context.bootstrap(), options);
      if (!context.expect_ok(group.status(), "Group::create")) return;
      body(context, **group);
      context.expect_ok((*group)->destroy(), "destroy");
    });
  }
  static void run_cases(const std::vector<PreparedCase>& cases) {
    run([&](RankContext& context, Group& group) {
      for (const PreparedCase& one : cases) check_case(context, group, one);
    });
  }
};

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

/// Exact routes and latency mode hold no more than bytes_required returns.
TEST_P(GpuNodes, BytesRequiredIsABound) {
  ExchangeCase spec;
  spec.name = "memory";
  spec.world = {.num_topk = 4, .num_experts = 4 * GetParam().num_ranks(), .max_tokens = 300};
  spec.memory = MemoryKind::kPlain;
  spec.dispatches = {{.hidden = 1024, .num_scales = 8}};
  spec.combines = {{.hidden = 1024, .weighted = true, .return_weights = true}};
  const PreparedCase exact = prepare_on_nodes(spec);
  spec.world.layout = Layout::kSlab;
  spec.combines = {{.hidden = 1024, .weighted = true, .order = CombineOrder::kRankSums}};
  const PreparedCase decode = prepare_on_nodes(spec);
  for (const bool latency : {false, true}) {
    run(
        [&](RankContext& context, Group& group) {
          const PreparedCase& one = latency ? decode : exact;
          MemoryShape shape;
          shape.backend = "cuda";
          shape.num_ranks = GetParam().num_ranks();
          shape.ranks_per_node = GetParam().ranks_per_node;
          shape.num_experts = one.world.options.num_experts;
          shape.num_tokens = one.num_tokens(context.rank());
          shape.num_topk = one.world.num_topk;
          shape.num_recv_rows = one.routings[static_cast<std::size_t>(context.rank())].num_recv_rows;
          shape.row_bytes = 2048;
          shape.scale_row_bytes = 32;
          shape.layout = one.world.options.layout;
          shape.weights = true;
          shape.symmetric = false;
          shape.num_node_tokens = shape.num_tokens;
          shape.num_forwarded_tokens = (GetParam().num_nodes - 1) * std::int64_t{300};
          if (latency) shape.max_tokens = latency_max_tokens(one);
          if (latency) shape.latency_bytes = latency_bytes_of("cuda", {decode});
          const Result<std::size_t> required = bytes_required(shape);
          if (!context.expect_ok(required.status(), "bytes_required")) return;
          for (int repeat = 0; repeat < 3; ++repeat) {
            if (latency) {
              check_latency_case(context, group, one, Halves::kTogether);
            } else {
              check_case(context, group, one);
            }
          }
          const std::size_t held = group.memory_usage().total_bytes();
          context.expect(held <= *required, fmt::format("{} bytes are held, {} required", held, *required));
        },
        latency ? std::vector{decode} : std::vector<PreparedCase>());
  }
}

TEST_P(GpuNodes, UsageNamesTheRails) {
  const std::vector<PreparedCase> cases = random_cases(277, 1);
  run([&](RankContext& context, Group& group) {
    check_case(context, group, cases[0]);
    const NetworkUsage usage = group.network_usage();
    context.expect(usage.transport == options_of(GetParam()).transport, usage.transport);
    context.expect(static_cast<int>(usage.rails.size()) == GetParam().num_nodes - 1, "one entry for each rail peer");
    for (const RailUsage& rail : usage.rails) context.expect(rail.sent_bytes > 0, "bytes were sent");
    context.expect(group.memory_usage().network_bytes > 0, "rings take memory");
  });
}

/// Rounds of calls without waits in between. Resident memory is not checked, because CUDA's driver keeps some of it.
TEST_P(GpuNodes, ManyCallsHoldNoMoreThanFew) {
  constexpr int kCallsAStep = 40;
  constexpr std::size_t kSpareHeapBytes = std::size_t{256} << 10;  // UCX's buffers are allocated and freed; 400 bytes
                                                                   // per call
  ExchangeCase spec;
  spec.name = "soak";
  spec.world = {.num_topk = 2, .num_experts = 2 * GetParam().num_ranks(), .max_tokens = 16};
  spec.dispatches = {{.hidden = 256}};
  spec.combines = {{.hidden = 256, .weighted = true}};
  const PreparedCase prepared = prepare_on_nodes(spec);
  // Processes that share a GPU take turns in time slices.
  const int num_steps = GetParam().kind == RankKind::kThreads ? 6 : 2;
  run([&](RankContext& context, Group& group) {
    std::optional<ProcessUsage> warm;
    std::size_t group_bytes = 0;
    for (int step = 0; step < num_steps; ++step) {
      {
        Round calls(context, group, prepared);
        for (int call = 0; call < kCallsAStep; ++call) {
          if (!calls.start(context, group, stream_of(group))) return;
        }
        if (!context.expect_ok(group.wait(stream_of(group)), "wait")) return;
        calls.expect_received(context);
      }
      meet(context);
      // Ranks that are threads share a process, and reading its usage needs a descriptor, so they take turns.
      const std::size_t held = group.memory_usage().total_bytes();
      ProcessUsage now;
      for (int turn = 0; turn < GetParam().num_ranks(); ++turn) {
        if (turn == context.rank()) now = process_usage();
        meet(context);
      }
      if (!warm) {
        warm = now;
        group_bytes = held;
      }
      context.expect(held <= group_bytes, fmt::format("the group holds {} bytes after {}", held, group_bytes));
      context.expect(now.num_descriptors <= warm->num_descriptors, "descriptors are left open");
      context.expect(now.heap_bytes <= warm->heap_bytes + kSpareHeapBytes,
                     fmt::format("heap of {} bytes after {}", now.heap_bytes, warm->heap_bytes));
    }
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

std::vector<Shape> emulated_shapes() { return {{2, 1}, {2, 2}, {4, 1}, {2, 4}, {3, 2}}; }

INSTANTIATE_TEST_SUITE_P(Shapes, GpuNodes, testing::ValuesIn(emulated_shapes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Shapes, GpuNodesWithFaults, testing::ValuesIn(emulated_shapes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Ucx, GpuNodes,
                         testing::Values(Shape{2, 1, RankKind::kProcesses, "ucx"},
                                         Shape{2, 2, RankKind::kProcesses, "ucx"},
                                         Shape{2, 1, RankKind::kThreads, "ucx"}),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Ucx, GpuNodesOfProcesses,
                         testing::Values(Shape{4, 1, RankKind::kProcesses, "ucx"},
                                         Shape{3, 2, RankKind::kProcesses, "ucx"},
                                         Shape{2, 4, RankKind::kProcesses, "ucx"}),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
