/// Groups of GPU ranks on several nodes, emulated on one host: ranks are threads, and the network between them is the
/// loopback engine, or UCX; or processes, and it is UCX.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>

#include "gpu/gpu_group.hpp"
#include "net/loopback/faults.hpp"
#include "support/device_memory.hpp"
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
  static void run(const std::function<void(RankContext&, Group&)>& body) {
    run_gpu_ranks({GetParam().kind, GetParam().num_ranks()}, [&](RankContext& context) {
      auto group = Group::create(context.bootstrap(), options_of(GetParam()));
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

/// Longer than a chunk of any ring, so that rows are sent in slices, together with weights and scales.
TEST_P(GpuNodes, RowsLongerThanAChunk) {
  ExchangeCase spec;
  spec.name = "long rows";
  spec.world = {.num_topk = 3, .num_experts = 2 * GetParam().num_ranks() + 1, .max_tokens = 3};
  spec.dispatches = {{.hidden = 132000, .num_scales = 7}};
  spec.combines = {
      {.dtype = DType::kFloat32, .hidden = 66000, .weighted = true, .num_biases = 2, .return_weights = true}};
  run_cases({prepare_on_nodes(spec)});
}

/// More rows than the rings hold, so that every chunk is reused many times.
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

/// A call that one rank refuses is refused everywhere, in the same words, and the group goes on.
TEST_P(GpuNodes, OneRefusalIsEverybodysError) {
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

/// Rounds of calls that nobody waits between. Resident memory is left out: what CUDA's driver keeps of it is not ours.
TEST_P(GpuNodes, ManyCallsHoldNoMoreThanFew) {
  constexpr int kCallsAStep = 40;
  constexpr std::size_t kSpareHeapBytes = std::size_t{256} << 10;  // UCX's buffers come and go; 400 bytes a call
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
      const ProcessUsage now = process_usage();
      const std::size_t held = group.memory_usage().total_bytes();
      meet(context);
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

std::vector<Shape> emulated_shapes() { return {{2, 1}, {2, 2}, {4, 1}, {3, 2}}; }

INSTANTIATE_TEST_SUITE_P(Shapes, GpuNodes, testing::ValuesIn(emulated_shapes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Shapes, GpuNodesWithFaults, testing::ValuesIn(emulated_shapes()),
                         [](const auto& test) { return describe(test.param); });
INSTANTIATE_TEST_SUITE_P(Ucx, GpuNodes,
                         testing::Values(Shape{2, 1, RankKind::kProcesses, "ucx"},
                                         Shape{2, 2, RankKind::kProcesses, "ucx"},
                                         Shape{2, 1, RankKind::kThreads, "ucx"}),
                         [](const auto& test) { return describe(test.param); });

}  // namespace
}  // namespace ferry::test
