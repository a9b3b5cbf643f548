#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "conformance/latency_conformance.hpp"

/// Wait times of latency mode calls, by rank, which calls add to sums that the program passes in.

namespace ferry::test {
namespace {

constexpr int kNumRanks = 4;
constexpr int kLate = 2;
constexpr int kBad = 3;
constexpr std::chrono::milliseconds kDelay{5};
/// Emulated kernels take a tenth of a second.
constexpr std::chrono::milliseconds kDelayOnGpus{300};
/// In one of this many calls other ranks arrive before the late rank, however busy the machine is.
constexpr int kMostRounds = 200;
constexpr std::int64_t kMeetTimeoutNs = 60 * kNsPerSecond;
constexpr std::int64_t kBefore = 1000;

/// [R] i64, as a program passes them.
class WaitSums {
 public:
  explicit WaitSums(const Group& group)
      : on_device_(uses_device(group)), memory_(on_device_, std::vector<std::int64_t>(kNumRanks, kBefore)) {}

  TensorView view() { return {memory_.data(), DType::kInt64, {kNumRanks}}; }
  /// Time added since construction.
  std::vector<std::int64_t> added() {
    const Bytes bytes = read_memory(on_device_, memory_.data(), kNumRanks * sizeof(std::int64_t));
    std::vector<std::int64_t> sums(kNumRanks);
    std::memcpy(sums.data(), bytes.data(), bytes.size());
    for (std::int64_t& sum : sums) sum -= kBefore;
    return sums;
  }

 private:
  bool on_device_;
  PlainMemory memory_;
};

std::vector<std::int64_t> difference(const std::vector<std::int64_t>& after, const std::vector<std::int64_t>& before) {
  std::vector<std::int64_t> grown(after.size());
  for (std::size_t i = 0; i < after.size(); ++i) grown[i] = after[i] - before[i];
  return grown;
}

/// Returns true if `says` is true on any rank. All ranks meet here.
bool any_rank(RankContext& context, bool says) {
  const std::byte mine{static_cast<std::uint8_t>(says ? 1 : 0)};
  const auto all = context.bootstrap()->all_gather({&mine, 1}, kMeetTimeoutNs);
  if (!context.expect_ok(all.status(), "meet")) return true;
  for (const auto& bytes : *all) {
    if (bytes.front() != std::byte{0}) return true;
  }
  return false;
}

class LatencyWaitTimes : public LatencyConformance {
 protected:
  static std::byte* host_memory() {
    alignas(64) static std::byte memory[1 << 16];
    return memory;
  }
  /// Ranks that wait for each other directly: those of one node or one rail.
  static bool are_neighbours(const Group& group, int rank, int other) {
    const int size = group.topology().ranks_per_node;
    return rank != other && (rank / size == other / size || rank % size == other % size);
  }

  void come_late(const RankContext& context) const {
    if (context.rank() == kLate) std::this_thread::sleep_for(on_gpus() ? kDelayOnGpus : kDelay);
  }

  /// Checks the times that one call added. Hosts that move rows count each wait once, for the group and for the call.
  /// Returns true if a neighbour's late arrival shows.
  static bool expect_added(RankContext& context, const Group& group, WaitSums& sums,
                           const std::vector<std::int64_t>& group_waits, const std::string& what) {
    const std::vector<std::int64_t> added = sums.added();
    const auto shown = fmt::format("{}: {} ns were added", what, fmt::join(added, ", "));
    context.expect(added[static_cast<std::size_t>(context.rank())] == 0, shown + ": a rank waits for itself");
    for (const std::int64_t time_ns : added) context.expect(time_ns >= 0, shown);
    if (!uses_device(group)) {
      context.expect(added == group_waits,
                     fmt::format("{}, and the group has waited {}", shown, fmt::join(group_waits, ", ")));
    }
    return added[kLate] > 0 && are_neighbours(group, context.rank(), kLate);
  }
};

/// Tests whole calls, and split calls, in which only the receive half counts.
TEST_P(LatencyWaitTimes, ARankThatComesLateShows) {
  const PreparedCase prepared = prepare_latency(small_latency_case(kNumRanks));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    for (const bool split : {false, true}) {
      bool dispatch_shows = false;
      bool combine_shows = false;
      for (int round = 0; round < kMostRounds; ++round) {
        const std::string what = fmt::format("{}, round {}", split ? "halves" : "whole", round);
        LatencyDispatchTensors dispatch(context, group, prepared, 0);
        LatencyCombineTensors combine(context, group, prepared, 0);
        WaitSums dispatch_sums(group);
        WaitSums combine_sums(group);
        dispatch.options.wait_times_ns = dispatch_sums.view();
        combine.options.wait_times_ns = combine_sums.view();
        dispatch.options.split = combine.options.split = split;
        any_rank(context, false);
        come_late(context);
        std::vector<std::int64_t> before = group.wait_times_ns();
        auto routing = group.latency_dispatch(dispatch.in, dispatch.out, dispatch.options, stream_of(group));
        if (!context.expect_ok(finish(group, routing.status()), what)) return;
        if (split) context.expect_ok(finish(group, group.latency_receive(*routing, stream_of(group))), what);
        dispatch.expect_received(context, what);
        dispatch_shows = expect_added(context, group, dispatch_sums, difference(group.wait_times_ns(), before),
                                      what + ", dispatch") ||
                         dispatch_shows;
        any_rank(context, false);
        come_late(context);
        before = group.wait_times_ns();
        context.expect_ok(
            finish(group, group.latency_combine(*routing, combine.in, combine.out, stream_of(group), combine.options)),
            what);
        if (split) context.expect_ok(finish(group, group.latency_receive(*routing, stream_of(group))), what);
        combine.expect_received(context, what);
        combine_shows =
            expect_added(context, group, combine_sums, difference(group.wait_times_ns(), before), what + ", combine") ||
            combine_shows;
        if (any_rank(context, dispatch_shows) && any_rank(context, combine_shows)) break;
      }
      context.expect(any_rank(context, dispatch_shows), "no rank has waited in a dispatch");
      context.expect(any_rank(context, combine_shows), "no rank has waited in a combine");
    }
  });
}

/// Two calls in flight add to the same sums and are received in another order than they were sent.
TEST_P(LatencyWaitTimes, CallsInFlightAddToTheSameNumbers) {
  const PreparedCase prepared = prepare_latency(small_latency_case(kNumRanks));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    LatencyDispatchTensors a(context, group, prepared, 0);
    LatencyDispatchTensors b(context, group, prepared, 0);
    WaitSums sums(group);
    a.options.wait_times_ns = b.options.wait_times_ns = sums.view();
    a.options.split = b.options.split = true;
    const std::vector<std::int64_t> before = group.wait_times_ns();
    auto first = group.latency_dispatch(a.in, a.out, a.options, stream_of(group));
    auto second = group.latency_dispatch(b.in, b.out, b.options, stream_of(group));
    if (!context.expect_ok(first.status(), "first") || !context.expect_ok(second.status(), "second")) return;
    context.expect_ok(finish(group, group.latency_receive(*second, stream_of(group))), "receive the second");
    context.expect_ok(finish(group, group.latency_receive(*first, stream_of(group))), "receive the first");
    a.expect_received(context, "first: ");
    b.expect_received(context, "second: ");
    expect_added(context, group, sums, difference(group.wait_times_ns(), before), "both");
  });
}

/// A refused call adds nothing on the rank whose arguments were wrong, however long it waits until the others learn of
/// the refusal.
TEST_P(LatencyWaitTimes, ARefusedCallAddsNothing) {
  const PreparedCase prepared = prepare_latency(small_latency_case(kNumRanks));
  run_with_group(kNumRanks, [&](RankContext& context, Group& group) {
    const bool bad = context.rank() == kBad;
    for (const bool split : {false, true}) {
      const std::string halves = split ? "halves, " : "whole, ";
      const auto expect_refusal = [&](WaitSums& sums, const Status& sent, const Routing* received,
                                      const std::string& what) {
        const std::vector<std::int64_t> at_once = sums.added();
        Status told = sent;
        if (bad) {
          context.expect_code(sent, ErrorCode::kInvalidArgument, what);
        } else if (sent.ok() && split && received != nullptr) {
          told = group.latency_receive(*received, stream_of(group));
        }
        context.expect_code(finish(group, told), ErrorCode::kInvalidArgument, what);
        if (!bad) return;
        const std::vector<std::int64_t> none(kNumRanks, 0);
        context.expect(at_once == none, fmt::format("{}: at once {}", what, fmt::join(at_once, ", ")));
        context.expect(sums.added() == none, fmt::format("{}: then {}", what, fmt::join(sums.added(), ", ")));
      };
      // Lets the group wait before.
      any_rank(context, false);
      come_late(context);
      LatencyExchange exchange(context, group, prepared);
      if (!exchange.dispatch()) return;
      {
        LatencyDispatchTensors in_flight(context, group, prepared, 0);
        in_flight.options.split = true;
        const auto before = group.latency_dispatch(in_flight.in, in_flight.out, in_flight.options, stream_of(group));
        if (!context.expect_ok(before.status(), halves + "in flight")) return;
        LatencyDispatchTensors tensors(context, group, prepared, 0);
        WaitSums sums(group);
        tensors.options.wait_times_ns = sums.view();
        tensors.options.split = split;
        // Mistakes that are checked last: place of GPU memory, and use of a slab that is in flight.
        if (bad && uses_device(group)) tensors.out.x.data = host_memory();
        if (bad && !uses_device(group)) tensors.out = in_flight.out;
        any_rank(context, false);
        come_late(context);
        const auto routing = group.latency_dispatch(tensors.in, tensors.out, tensors.options, stream_of(group));
        expect_refusal(sums, routing.status(), routing.ok() ? &*routing : nullptr, halves + "dispatch");
        context.expect_ok(finish(group, group.latency_receive(*before, stream_of(group))), halves + "in flight");
        in_flight.expect_received(context, halves + "in flight: ");
      }
      LatencyCombineTensors tensors(context, group, prepared, 0);
      WaitSums sums(group);
      tensors.options.wait_times_ns = sums.view();
      tensors.options.split = split;
      if (bad) tensors.out.x.data = uses_device(group) ? host_memory() : const_cast<void*>(tensors.in.x.data);
      any_rank(context, false);
      come_late(context);
      const Status sent =
          group.latency_combine(exchange.routing(), tensors.in, tensors.out, stream_of(group), tensors.options);
      expect_refusal(sums, sent, &exchange.routing(), halves + "combine");
      if (!exchange.combine(0)) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, LatencyWaitTimes, testing::ValuesIn(backend_configs()), config_name);

}  // namespace
}  // namespace ferry::test
