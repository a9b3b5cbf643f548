/// Memory of groups of GPU ranks on several nodes, and what they say of their network.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>

#include "gpu/nodes_group.hpp"
#include "support/process_usage.hpp"

namespace ferry::test {
namespace {

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

}  // namespace
}  // namespace ferry::test
