/// Streams that a rank cannot use: the rank's own call refuses them, every peer learns of it at once, and the group
/// remains usable.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;
constexpr int kBadRank = 1;

PreparedCase good_case() {
  ExchangeCase one;
  one.name = "good case";
  one.world = {.num_ranks = kNumRanks, .num_topk = 2, .num_experts = 6, .max_tokens = 4};
  one.dispatches = {{.hidden = 16, .num_scales = 3}};
  one.combines = {{.hidden = 16, .weighted = true, .return_weights = true}};
  return prepare(one);
}

class BadStream : public testing::TestWithParam<RankKind> {
 protected:
  /// Makes every call in turn on stream `wrong`, on one rank.
  static void check_refusals(RankContext& context, Group& group, const PreparedCase& good, Stream wrong) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    const bool bad = context.rank() == kBadRank;
    const Stream stream = bad ? wrong : stream_of(group);
    const auto expect_refusal = [&](const Status& status, const std::string& what) {
      const Status told = bad ? status : finish(group, status);
      context.expect(!told.ok() && told.code() != ErrorCode::kTimeout && told.code() != ErrorCode::kPeerLost,
                     fmt::format("{}: {}", what, told.to_string()));
      context.expect(told.peer() == kBadRank && told.message().starts_with(fmt::format("rank {}: ", kBadRank)),
                     fmt::format("{}: blames rank {}: {}", what, told.peer(), told.to_string()));
    };
    for (const std::int64_t max_recv_rows : {0, 40}) {
      const RouteArguments arguments(context, group, good);
      RouteOptions options = arguments.options();
      options.max_recv_rows = max_recv_rows;
      expect_refusal(group.route(arguments.input(), options, stream).status(),
                     fmt::format("route, max_recv_rows {}", max_recv_rows));
    }
    DispatchTensors sent(context, group, good, 0);
    expect_refusal(group.dispatch(routing, sent.in, sent.out, stream, sent.options), "dispatch");
    sent.expect_untouched(context, "dispatch: ");
    CombineTensors returned(context, group, good, 0);
    expect_refusal(group.combine(routing, returned.in, returned.out, stream, returned.options), "combine");
    returned.expect_untouched(context, "combine: ");
  }
};

TEST_P(BadStream, OfAnotherGpuIsRefused) {
  if (num_device_files() < 2) GTEST_SKIP() << "needs two GPUs, this machine has " << num_device_files();
  const PreparedCase good = good_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    const OwnedStream other((current_device() + 1) % num_devices());
    meet(context);
    check_refusals(context, group, good, other.get());
    check_case(context, group, good);
    meet(context);
  });
}

/// CUDA refuses work on the default stream while a stream for which it waits is captured.
TEST_P(BadStream, TheDefaultOneDuringACaptureIsRefused) {
  const PreparedCase good = good_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    const OwnedStream blocking = OwnedStream::blocking();
    CapturedGraph graph;
    if (context.rank() == kBadRank) graph.begin_relaxed(blocking.get());
    meet(context);
    check_refusals(context, group, good, Stream{});
    if (context.rank() == kBadRank) graph.end();
    meet(context);
    check_case(context, group, good);
  });
}

/// A call that cannot become part of a graph does no harm: no rank waits for it.
TEST_P(BadStream, WhoseCaptureIsInvalidBreaksNothing) {
  const PreparedCase good = good_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, good);
    if (!routing.present()) return;
    const DispatchTensors sent(context, group, good, 0);
    const CombineTensors returned(context, group, good, 0);
    const RouteArguments arguments(context, group, good);
    RouteOptions bounded = arguments.options();
    bounded.max_recv_rows = 40;
    meet(context);
    const OwnedStream stream;
    CapturedGraph graph;
    graph.begin(stream.get());
    graph.spoil();
    context.expect_code(group.route(arguments.input(), bounded, stream.get()).status(), ErrorCode::kCuda, "route");
    context.expect_code(group.dispatch(routing, sent.in, sent.out, stream.get(), sent.options), ErrorCode::kCuda,
                        "dispatch");
    context.expect_code(group.combine(routing, returned.in, returned.out, stream.get(), returned.options),
                        ErrorCode::kCuda, "combine");
    graph.end();
    meet(context);
    check_case(context, group, good);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BadStream, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return kind_name(test.param); });

}  // namespace
}  // namespace ferry::test
