/// Calls queued after much other work of the program on the same stream: the host waits as long as that work takes, the
/// program may destroy objects meanwhile, and CUDA's record of errors is unchanged.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

PreparedCase one_case(int num_ranks, bool bounded) {
  ExchangeCase one;
  one.name = bounded ? "bounded" : "exact";
  one.world = {.num_ranks = num_ranks, .num_topk = 3, .num_experts = 7, .max_tokens = 64};
  one.world.spare_recv_rows = bounded ? 3 : -1;
  one.memory = MemoryKind::kPlain;
  one.dispatches = {{.hidden = 512}};
  one.combines = {{.hidden = 512}};
  return prepare(one);
}

/// Runs a group of one rank, so that only the host waits.
void run_alone(std::chrono::milliseconds timeout, const std::function<void(RankContext&, Group&)>& body) {
  run_gpu_ranks({RankKind::kThreads, 1}, [&](RankContext& context) {
    GroupOptions options = gpu_group_options();
    options.timeout_ns = std::chrono::nanoseconds(timeout).count();
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    body(context, **group);
  });
}

TEST(QueuedWork, InFrontOfARouteDoesNotCountAsItsTime) {
  constexpr std::chrono::milliseconds kTimeout{200};
  constexpr std::chrono::milliseconds kQueued{5 * kTimeout};
  for (const bool bounded : {false, true}) {
    const PreparedCase prepared = one_case(1, bounded);
    run_alone(kTimeout, [&](RankContext& context, Group& group) {
      const RouteArguments arguments(context, group, prepared);
      enqueue_delay(stream_of(group), kQueued);
      const auto routing = group.route(arguments.input(), arguments.options(), stream_of(group));
      if (!context.expect_ok(routing.status(), prepared.spec.name)) return;
      // Requested before the stream is waited for.
      context.expect(routing->num_used_rows() == prepared.routings[0].num_used_rows, "num_used_rows");
      context.expect(!routing->num_rows_to_rank().empty() && routing->num_rows_to_rank()[0] > 0, "num_rows_to_rank");
      context.expect_ok(group.wait(stream_of(group)), "wait");
      expect_routing(context, group, *routing, prepared);
      context.expect_ok(group.destroy(), "destroy");
    });
  }
}

TEST(QueuedWork, ThatDoesNotEndIsNotWaitedForForEver) {
  constexpr std::chrono::milliseconds kTimeout{20};
  constexpr std::chrono::milliseconds kQueued{100 * kTimeout};
  const PreparedCase prepared = one_case(1, false);
  run_alone(kTimeout, [&](RankContext& context, Group& group) {
    const RouteArguments arguments(context, group, prepared);
    enqueue_delay(stream_of(group), kQueued);
    const Status status = group.route(arguments.input(), arguments.options(), stream_of(group)).status();
    context.expect_code(status, ErrorCode::kTimeout, "route");
    context.expect_code(group.destroy(), ErrorCode::kTimeout, "destroy");
  });
}

/// Hosts that check whether work is done and find that it is not must leave no error for the program.
TEST(QueuedWork, LeavesTheProgramsLastErrorAlone) {
  constexpr std::chrono::milliseconds kQueued{20};
  const PreparedCase exact = one_case(1, false);
  const PreparedCase bounded = one_case(1, true);
  run_alone(std::chrono::seconds(30), [&](RankContext& context, Group& group) {
    const Stream stream = stream_of(group);
    const RouteArguments exact_arguments(context, group, exact);
    const RouteArguments bounded_arguments(context, group, bounded);
    const DispatchTensors tensors(context, group, bounded, 0);
    for (const bool mistaken : {false, true}) {
      clear_device_error();
      if (mistaken) leave_device_error();
      const std::string expected = pending_device_error();
      context.expect(expected.empty() != mistaken, "the program's own error: " + expected);
      const auto expect_record = [&](const char* what) {
        const std::string seen = pending_device_error();
        context.expect(seen == expected, fmt::format("after {}: \"{}\" for \"{}\"", what, seen, expected));
      };
      enqueue_delay(stream, kQueued);
      context.expect_ok(group.route(exact_arguments.input(), exact_arguments.options(), stream).status(),
                        "exact route");
      expect_record("an exact route");
      for (int i = 0; i < 3; ++i) {
        enqueue_delay(stream, kQueued);
        const auto routing = group.route(bounded_arguments.input(), bounded_arguments.options(), stream);
        if (!context.expect_ok(routing.status(), "bounded route")) return;
        context.expect_ok(group.dispatch(*routing, tensors.in, tensors.out, stream, tensors.options), "dispatch");
        expect_record("a dispatch in progress");
      }
      {
        const auto buffer = group.allocate(4096);
        context.expect_ok(buffer.status(), "allocate");
      }
      expect_record("memory allocated and freed meanwhile");
      context.expect_ok(group.wait(stream), "wait");
      expect_record("a wait");
    }
    clear_device_error();
    context.expect_ok(group.destroy(), "destroy");
  });
}

/// CUDA gives a new stream the handle of a destroyed one whose work continues: they are different streams.
TEST(QueuedWork, OnAStreamThatIsGoneIsFollowedByTheNextCall) {
  constexpr std::chrono::milliseconds kQueued{100};
  const PreparedCase prepared = one_case(1, false);
  run_alone(std::chrono::seconds(30), [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, prepared);
    if (!routing.present()) return;
    for (int round = 0; round < 5; ++round) {
      const DispatchTensors first(context, group, prepared, 0);
      const DispatchTensors next(context, group, prepared, 0);
      {
        const OwnedStream gone;
        enqueue_delay(gone.get(), kQueued);
        context.expect_ok(group.dispatch(routing, first.in, first.out, gone.get(), first.options), "dispatch");
      }
      const OwnedStream stream;
      context.expect_ok(group.dispatch(routing, next.in, next.out, stream.get(), next.options), "the next dispatch");
      context.expect_ok(group.wait(stream.get()), "wait");
      first.expect_received(context, "on the destroyed stream: ");
      next.expect_received(context, "on the next stream: ");
    }
    context.expect_ok(group.destroy(), "destroy");
  });
}

/// A program that is always ahead of its GPU never finds it idle, and must not take new memory for each of its calls.
TEST(QueuedWork, ThatNeverEndsDoesNotHoldTheMemoryOfCallsThatAreDone) {
  constexpr std::chrono::milliseconds kQueued{10};
  constexpr int kNumRounds = 30;
  constexpr std::size_t kMostAtOnce = 8;
  const PreparedCase prepared = one_case(1, true);
  run_alone(std::chrono::seconds(30), [&](RankContext& context, Group& group) {
    const RouteArguments arguments(context, group, prepared);
    const std::array<OwnedStream, 2> streams;
    context.expect_ok(group.route(arguments.input(), arguments.options(), stream_of(group)).status(),
                      "the first route");
    context.expect_ok(group.wait(stream_of(group)), "wait");
    const std::size_t idle_bytes = group.memory_usage().staging_bytes;  // memory of the first route is kept
    std::size_t one_bytes = 0;
    for (int round = 0; round < kNumRounds; ++round) {
      const Stream stream = streams[static_cast<std::size_t>(round % 2)].get();
      // Half a delay between the two: one is done while the other is not.
      synchronize(stream);
      enqueue_delay(stream, round == 1 ? kQueued + kQueued / 2 : kQueued);
      const auto routing = group.route(arguments.input(), arguments.options(), stream);
      if (!context.expect_ok(routing.status(), "route")) return;
      if (round == 0) one_bytes = group.memory_usage().staging_bytes - idle_bytes;
    }
    const std::size_t held_bytes = group.memory_usage().staging_bytes - idle_bytes;
    context.expect(one_bytes > 0 && held_bytes <= kMostAtOnce * one_bytes,
                   fmt::format("{} bytes are held after {} routes of {}", held_bytes, kNumRounds, one_bytes));
    for (const OwnedStream& stream : streams) context.expect_ok(group.wait(stream.get()), "wait");
    context.expect(group.memory_usage().staging_bytes == idle_bytes, "memory is held although no call is in progress");
    context.expect_ok(group.destroy(), "destroy");
  });
}

class QueuedCalls : public testing::TestWithParam<RankKind> {};

/// A Buffer is destroyed while a dispatch into it and a combine from it are in progress. The next allocation must not
/// get that memory, nor may its zeroing affect the calls.
TEST_P(QueuedCalls, KeepTheBuffersThatTheyUse) {
  constexpr int kNumRanks = 2;
  constexpr std::int64_t kHidden = 256;
  constexpr std::chrono::milliseconds kQueued{50};
  const PreparedCase prepared = one_case(kNumRanks, false);
  run_gpu_group(GetParam(), kNumRanks, [&](RankContext& context, Group& group) {
    const Routing routing = check_route(context, group, prepared);
    if (!routing.present()) return;
    const Stream stream = stream_of(group);
    const std::int64_t num_tokens = routing.num_tokens();
    const std::int64_t num_rows = routing.num_recv_rows();
    const std::vector<float> x(static_cast<std::size_t>(num_tokens * kHidden), 1.0F);
    PlainMemory x_memory(true, x);
    PlainMemory out_memory(true, x.size() * sizeof(float));
    const TensorView x_view(x_memory.data(), DType::kFloat32, {num_tokens, kHidden});
    const TensorView out_view(out_memory.data(), DType::kFloat32, {num_tokens, kHidden});
    const std::size_t recv_bytes = static_cast<std::size_t>(num_rows * kHidden) * sizeof(float);
    for (int round = 0; round < 3; ++round) {
      fill_device(out_memory.data(), std::byte{0xEE}, x.size() * sizeof(float));
      meet(context);
      enqueue_delay(stream, kQueued);
      {
        auto recv = group.allocate(recv_bytes);
        if (!context.expect_ok(recv.status(), "allocate")) return;
        const TensorView recv_view(recv->data(), DType::kFloat32, {num_rows, kHidden});
        context.expect_ok(group.dispatch(routing, {x_view, {}, {}}, {recv_view, {}, {}, {}, {}}, stream), "dispatch");
        context.expect_ok(group.combine(routing, {recv_view, {}, {}, {}}, {out_view, {}}, stream), "combine");
      }
      const auto next = group.allocate(recv_bytes);
      if (!context.expect_ok(next.status(), "allocate the next one")) return;
      context.expect_ok(group.wait(stream), "wait");
      const Bytes bytes = read_memory(true, next->data(), recv_bytes);
      context.expect(std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; }),
                     "a call wrote into memory that was allocated after it");
      const Bytes sums = read_memory(true, out_memory.data(), x.size() * sizeof(float));
      const auto* out = reinterpret_cast<const float*>(sums.data());
      const std::int32_t* slots = prepared.routings[static_cast<std::size_t>(context.rank())].slots.data();
      const auto num_topk = static_cast<std::size_t>(prepared.world.num_topk);
      for (std::size_t token = 0; token < static_cast<std::size_t>(num_tokens); ++token) {
        const bool goes = std::any_of(slots + token * num_topk, slots + (token + 1) * num_topk,
                                      [](std::int32_t slot) { return slot >= 0; });
        const float sum = out[token * static_cast<std::size_t>(kHidden)];
        context.expect(goes ? sum >= 1.0F : sum == 0.0F, fmt::format("token {} is {}", token, sum));
      }
    }
    // No memory is held back longer than the calls.
    const std::size_t before = group.memory_usage().allocated_bytes;
    (void)group.allocate(recv_bytes);
    context.expect(group.memory_usage().allocated_bytes == before, "a Buffer that no call uses was not freed at once");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, QueuedCalls, testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return kind_name(test.param); });

}  // namespace
}  // namespace ferry::test
