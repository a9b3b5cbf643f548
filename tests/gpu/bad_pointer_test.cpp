/// Pointers that a rank's GPU cannot use: the rank's own call refuses them, and every peer learns of the refusal.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;

class BadPointer : public testing::TestWithParam<RankKind> {
 protected:
  static PreparedCase good_case() {
    ExchangeCase one;
    one.name = "good case";
    one.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 6, .max_tokens = 4};
    one.dispatches = {{.hidden = 16, .num_scales = 3}};
    one.combines = {{.hidden = 16, .weighted = true, .return_weights = true}};
    return prepare(one);
  }

  /// The bad rank gets the error from the call, the others when they wait.
  static void expect_refusal(RankContext& context, Group& group, const Status& status, int bad_rank,
                             const std::string& what) {
    if (context.rank() == bad_rank) context.expect_code(status, ErrorCode::kInvalidArgument, what + ", at once");
    const Status told = finish(group, status);
    if (!context.expect_code(told, ErrorCode::kInvalidArgument, what)) return;
    context.expect(told.message().find(fmt::format("rank {}", bad_rank)) != std::string_view::npos,
                   fmt::format("{}: does not name rank {}: {}", what, bad_rank, told.message()));
  }

  /// Puts each tensor of each call in turn at `wrong`, on one rank.
  static void check_refusals(RankContext& context, Group& group, const PreparedCase& good, void* wrong,
                             const std::string& kind) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    for (int bad_rank : {0, kNumRanks - 1}) {
      const bool bad = context.rank() == bad_rank;
      for (std::int64_t max_recv_rows : {0, 40}) {
        const RouteArguments arguments(context, group, good);
        RouteOptions options = arguments.options();
        options.max_recv_rows = max_recv_rows;
        for (bool ids : {true, false}) {
          RouteInput in = arguments.input();
          if (bad) (ids ? in.topk_idx : in.topk_weights).data = wrong;
          const Status status = group.route(in, options, stream_of(group)).status();
          expect_refusal(context, group, status, bad_rank, kind + (ids ? " as topk_idx" : " as topk_weights"));
        }
      }
      for (int which = 0; which < 6; ++which) {
        DispatchTensors tensors(context, group, good, 0);
        if (bad && which == 0) tensors.in.x.data = wrong;
        if (bad && which == 1) tensors.in.scales.data = wrong;
        if (bad && which == 2) tensors.out.x.data = wrong;
        if (bad && which == 3) tensors.out.scales.data = wrong;
        if (bad && which == 4) tensors.out.topk_idx.data = wrong;
        if (bad && which == 5) tensors.out.source.data = wrong;
        const Status status = group.dispatch(routing, tensors.in, tensors.out, stream_of(group), tensors.options);
        expect_refusal(context, group, status, bad_rank, fmt::format("{} in dispatch ({})", kind, which));
        tensors.expect_untouched(context, kind + ": ");
      }
      for (int which = 0; which < 4; ++which) {
        CombineTensors tensors(context, group, good, 0);
        if (bad && which == 0) tensors.in.x.data = wrong;
        if (bad && which == 1) tensors.in.weights.data = wrong;
        if (bad && which == 2) tensors.out.x.data = wrong;
        if (bad && which == 3) tensors.out.weights.data = wrong;
        const Status status = group.combine(routing, tensors.in, tensors.out, stream_of(group), tensors.options);
        expect_refusal(context, group, status, bad_rank, fmt::format("{} in combine ({})", kind, which));
        tensors.expect_untouched(context, kind + ": ");
      }
      check_case(context, group, good);
    }
  }
};

TEST_P(BadPointer, HostMemoryIsRefused) {
  const PreparedCase good = good_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    alignas(64) static std::byte host[1 << 16];
    check_refusals(context, group, good, host, "host memory");
  });
}

TEST_P(BadPointer, MemoryOfAnotherGpuIsRefused) {
  if (num_device_files() < 2) GTEST_SKIP() << "needs two GPUs, this machine has " << num_device_files();
  const PreparedCase good = good_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    const int other = (current_device() + 1) % num_devices();
    reserve_device_memory(other, std::size_t{1} << 20);
    const DeviceMemory memory(1 << 16, other);
    meet(context);
    check_refusals(context, group, good, memory.data(), "memory of another GPU");
    meet(context);
  });
}

/// No rank waits between the refused call and the valid one after it. The valid call completes, and the wait reports
/// the refusal.
TEST_P(BadPointer, DoesNotHarmTheNextCallOnTheStream) {
  const PreparedCase good = good_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    alignas(64) static std::byte host[1 << 16];
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    const Stream stream = stream_of(group);
    const bool bad = context.rank() == 1;
    DispatchTensors refused(context, group, good, 0);
    const DispatchTensors next(context, group, good, 0);
    if (bad) refused.in.x.data = host;
    const Status status = group.dispatch(routing, refused.in, refused.out, stream, refused.options);
    context.expect(status.ok() != bad, "status of the call: " + status.to_string());
    context.expect_ok(group.dispatch(routing, next.in, next.out, stream, next.options), "the next call");
    const Status told = group.wait(stream);
    if (!bad) context.expect_code(told, ErrorCode::kInvalidArgument, "wait");
    refused.expect_untouched(context, "refused: ");
    next.expect_received(context, "behind it: ");
    context.expect_ok(group.wait(stream), "a second wait");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BadPointer, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return kind_name(test.param); });

}  // namespace
}  // namespace ferry::test
