/// Wait times that a late rank causes on the others, which hosts read without waiting.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/gpu_group.hpp"
#include "gpu/latency_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 2;
constexpr std::size_t kLate = 1;
/// Longer than the delay between two ranks' hosts on a busy machine.
constexpr std::chrono::milliseconds kDelay{50};
/// Delay of the late host: longer than kernels take where they are emulated.
constexpr std::chrono::milliseconds kLaunchDelay{300};
constexpr std::int64_t kMeetTimeoutNs = 30 * kNsPerSecond;

/// Calls for which no host waits.
PreparedCase bounded_case() {
  ExchangeCase one;
  one.name = "bounded";
  one.world = {.num_ranks = kNumRanks, .num_topk = 3, .num_experts = 7, .max_tokens = 64};
  one.world.spare_recv_rows = 3;
  one.memory = MemoryKind::kPlain;
  one.dispatches = {{.hidden = 512}};
  one.combines = {{.hidden = 512}};
  return prepare(one);
}

/// Whether `says` is true on any rank. All ranks meet here.
bool any_rank(RankContext& context, bool says) {
  const std::byte mine{static_cast<std::uint8_t>(says ? 1 : 0)};
  const auto all = context.bootstrap()->all_gather({&mine, 1}, kMeetTimeoutNs);
  if (!context.expect_ok(all.status(), "all ranks meet")) return true;
  return std::any_of(all->begin(), all->end(), [](const Bytes& said) { return said.front() != std::byte{0}; });
}

class WaitTimes : public testing::TestWithParam<RankKind> {
 protected:
  /// Makes the late rank's stream reach a call after the other rank's has been there for a while.
  static void make_late(RankContext& context, Group& group, const std::string& what,
                        const std::function<Status()>& call) {
    const auto rank = static_cast<std::size_t>(context.rank());
    const std::vector<std::int64_t> before = group.wait_times_ns();
    if (rank != kLate) context.expect_ok(call(), what);
    meet(context);
    if (rank == kLate) {
      enqueue_delay(stream_of(group), kDelay);
      context.expect_ok(call(), what);
    }
    context.expect_ok(group.wait(stream_of(group)), what);
    const std::vector<std::int64_t> after = group.wait_times_ns();
    context.expect(after[rank] == before[rank], what + ": a rank waits for itself");
    if (rank == kLate) return;
    const std::int64_t waited_ns = after[kLate] - before[kLate];
    context.expect(waited_ns >= std::chrono::nanoseconds(kDelay).count() / 2,
                   fmt::format("{}: {} ns for a rank that was {} ms late", what, waited_ns, kDelay.count()));
  }
};

TEST_P(WaitTimes, GrowByWhatALateRankCosts) {
  const PreparedCase prepared = bounded_case();
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    context.expect(group.wait_times_ns() == std::vector<std::int64_t>(kNumRanks, 0), "before the first call");
    const RouteArguments arguments(context, group, prepared);
    const DispatchTensors dispatch(context, group, prepared, 0);
    const CombineTensors combine(context, group, prepared, 0);
    Routing routing;
    make_late(context, group, "route", [&] {
      auto made = group.route(arguments.input(), arguments.options(), stream_of(group));
      if (made.ok()) routing = std::move(*made);
      return made.status();
    });
    make_late(context, group, "dispatch",
              [&] { return group.dispatch(routing, dispatch.in, dispatch.out, stream_of(group), dispatch.options); });
    make_late(context, group, "combine",
              [&] { return group.combine(routing, combine.in, combine.out, stream_of(group), combine.options); });
    dispatch.expect_received(context, "dispatch with a late rank: ");
    combine.expect_received(context, "combine with a late rank: ");
  });
}

TEST_P(WaitTimes, GrowInLatencyMode) {
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, 1);
  run_latency_group({.kind = GetParam(), .num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    for (const bool split : {false, true}) {
      LatencyPair pair(context, group, cases.front());
      meet(context);
      make_late(context, group, split ? "halves" : "whole calls",
                [&] { return pair.start(group, stream_of(group), split); });
      pair.expect_received(context);
    }
  });
}

/// The program's own sums, to which kernels of the call add. On a busy machine another rank may arrive later than the
/// late one, and not wait for it.
TEST_P(WaitTimes, AreAddedInEveryReplay) {
  constexpr int kNumGrowths = 2;
  constexpr int kMostReplays = 50;
  const std::vector<PreparedCase> cases = latency_cases_of_equal_shapes(kNumRanks, 1);
  run_latency_group({.kind = GetParam(), .num_ranks = kNumRanks}, cases, [&](RankContext& context, Group& group) {
    const auto rank = static_cast<std::size_t>(context.rank());
    for (const bool split : {false, true}) {
      const RankStream stream(context);
      PlainMemory times(true, std::vector<std::int64_t>(kNumRanks, 0));
      LatencyPair pair(context, group, cases.front());
      pair.count_waits(TensorView(times.data(), DType::kInt64, {kNumRanks}));
      meet(context);
      CapturedGraph graph;
      graph.begin(stream.get());
      const Status status = pair.start(group, stream.get(), split);
      graph.end();
      if (!context.expect_ok(status, "capturing")) return;
      graph.prepare();
      std::int64_t before_ns = 0;
      int num_growths = 0;
      for (int replay = 0; replay < kMostReplays; ++replay) {
        if (any_rank(context, num_growths == kNumGrowths)) break;
        if (rank == kLate) std::this_thread::sleep_for(kLaunchDelay);
        graph.launch();
        if (!context.expect_ok(group.wait(stream.get()), "replay")) return;
        const Bytes bytes = read_memory(true, times.data(), kNumRanks * sizeof(std::int64_t));
        std::array<std::int64_t, kNumRanks> sums{};
        std::memcpy(sums.data(), bytes.data(), bytes.size());
        const auto shown = fmt::format("{}, replay {}: {} ns", split ? "halves" : "whole", replay, sums[kLate]);
        context.expect(sums[rank] == 0, shown + " of a rank for itself");
        context.expect(sums[kLate] >= before_ns, shown + ", which is less than before");
        if (rank != kLate && sums[kLate] > before_ns) ++num_growths;
        before_ns = sums[kLate];
      }
      context.expect(any_rank(context, num_growths == kNumGrowths), "no rank waited in most replays");
      pair.expect_received(context);
      meet(context);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WaitTimes, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return kind_name(test.param); });

}  // namespace
}  // namespace ferry::test
