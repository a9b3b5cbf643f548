/// A rank fails at any step of Group::create: all ranks return the same error at once, with that rank's name. Steps are
/// the calls by which a rank takes something from the system; each fails once.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "failing_calls.hpp"
#include "ferry/group.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

/// Long enough that no rank reaches it unless it waits in vain.
constexpr std::int64_t kTimeoutNs = 60 * kNsPerSecond;

struct World {
  int num_ranks = 4;
  std::vector<int> failing{};
  /// Distance between the allocations that fail: there are many.
  int new_stride = 1;
};

/// Without it CTest's names would hold the bytes of the struct.
void PrintTo(const World& world, std::ostream* out) { *out << world.num_ranks << " ranks"; }

std::string world_name(const testing::TestParamInfo<World>& info) {
  std::string name = fmt::format("{}Ranks", info.param.num_ranks);
  for (const int rank : info.param.failing) name += fmt::format("Rank{}", rank);
  return name;
}

/// How a rank's Group::create ended, as plain bytes.
struct Outcome {
  ErrorCode code = ErrorCode::kOk;
  int peer = -1;
  ErrorCode first_call = ErrorCode::kOk;  ///< end of the group's first call
  bool has_failed = false;                ///< a call of this rank was made to fail
  std::int64_t time_ns = 0;
  std::array<char, 512> message{};
};

template <typename Value>
std::vector<Value> gather(Bootstrap& bootstrap, const Value& mine) {
  const auto all = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)), kTimeoutNs).value();
  std::vector<Value> values(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) std::memcpy(&values[i], all[i].data(), sizeof(Value));
  return values;
}

struct Door {
  std::uint16_t port = 0;
  std::array<char, 65> secret{};
};

/// Bootstrap of a group, which a failure may break. `control` lasts.
std::shared_ptr<Bootstrap> meet(Bootstrap& control) {
  Meeting meeting;
  Door door;
  if (control.rank() == 0) {
    meeting = Meeting::prepare();
    door.port = meeting.port;
    std::copy(meeting.secret.begin(), meeting.secret.end(), door.secret.begin());
  }
  door = gather(control, door)[0];
  if (control.rank() != 0) {
    meeting.port = door.port;
    meeting.secret = door.secret.data();
  }
  return create_tcp_bootstrap(meeting.options(control.rank(), control.num_ranks(), kTimeoutNs)).value();
}

GroupOptions options_of(int num_ranks) {
  GroupOptions options;
  options.backend = "cpu";
  options.timeout_ns = kTimeoutNs;
  options.arena_bytes = std::size_t{1} << 20;
  options.ranks_per_node = num_ranks / 2;
  return options;
}

/// A rank that fails after its part of the last exchange has told the others that it succeeds. They learn of its end in
/// their first call.
bool is_late(const std::vector<Outcome>& outcomes) {
  return std::ranges::all_of(outcomes, [](const Outcome& one) {
    if (one.has_failed) return one.code == ErrorCode::kSystem;
    return one.code == ErrorCode::kOk && one.first_call == ErrorCode::kPeerLost;
  });
}

/// Empty if the outcomes are those of a group that formed, or that failed on all ranks for one that failed.
std::string check(const std::vector<Outcome>& outcomes) {
  const Outcome& first = *std::ranges::find(outcomes, false, &Outcome::has_failed);
  // A rank that had no memory for the others' report says its own.
  const bool agree = std::ranges::all_of(outcomes, [&](const Outcome& one) {
    const bool names_itself = one.has_failed && one.peer == &one - outcomes.data();
    return one.code == first.code && (one.peer == first.peer || names_itself) && one.first_call == ErrorCode::kOk;
  });
  const bool is_named =
      first.code == ErrorCode::kOk || (first.peer >= 0 && first.peer < static_cast<int>(outcomes.size()) &&
                                       outcomes[static_cast<std::size_t>(first.peer)].has_failed);
  if (agree && is_named && first.code != ErrorCode::kTimeout) return {};
  if (is_late(outcomes)) return {};
  std::string text;
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const Outcome& one = outcomes[rank];
    text += fmt::format("\n  rank {}{}: {} peer {} after {} ms, first call {}: {}", rank,
                        one.has_failed ? " (failed)" : "", to_string(one.code), one.peer, one.time_ns / 1'000'000,
                        to_string(one.first_call), one.message.data());
  }
  return text;
}

/// One attempt to form a group. `begin` and `end` run around this rank's Group::create; `end` returns whether the rank
/// has failed at something.
template <typename Begin, typename End>
std::vector<Outcome> attempt(Bootstrap& control, Begin begin, End end) {
  const std::shared_ptr<Bootstrap> bootstrap = meet(control);
  GroupOptions options = options_of(control.num_ranks());
  const auto start = std::chrono::steady_clock::now();
  begin(&options);
  const auto group = Group::create(bootstrap, options);
  Outcome mine;
  mine.has_failed = end();
  mine.time_ns = (std::chrono::steady_clock::now() - start).count();
  mine.code = group.status().code();
  mine.peer = group.status().peer();
  const std::string message(group.status().message());
  message.copy(mine.message.data(), mine.message.size() - 1);
  if (group.ok()) mine.first_call = (*group)->destroy().code();
  return gather(control, mine);
}

void limit_address_space(rlim_t num_bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = num_bytes;
  setrlimit(RLIMIT_AS, &limit);
}

struct Summary {
  int num_attempts = 0;
  int num_failed = 0;
  std::int64_t longest_ns = 0;
  std::string wrong;
};

int stride_of(FailingCall call, const World& world) {
  // UCX's ports are found by asking every descriptor.
  constexpr int kGetsockoptStride = 7;
  if (call == FailingCall::kNew) return world.new_stride;
  return call == FailingCall::kGetsockopt ? kGetsockoptStride : 1;
}

Summary walk(Bootstrap& control, const World& world, FailingCall call) {
  const bool fails = std::ranges::count(world.failing, control.rank()) != 0;
  Summary summary;
  for (int n = 1;; n += stride_of(call, world)) {
    const std::vector<Outcome> outcomes = attempt(
        control,
        [&](GroupOptions* options) {
          // Between nodes UCX 1.13 may end a rank whose peer has gone while it connected (docs/transport.md), and
          // exceptions cannot pass its callbacks.
          if (call == FailingCall::kNew) options->ranks_per_node = control.num_ranks();
          if (fails) fail_call(call, n);
        },
        [&] { return fails && stop_failing(); });
    ++summary.num_attempts;
    for (const Outcome& one : outcomes) summary.longest_ns = std::max(summary.longest_ns, one.time_ns);
    if (outcomes.front().code != ErrorCode::kOk) ++summary.num_failed;
    if (const std::string wrong = check(outcomes); !wrong.empty()) {
      summary.wrong += fmt::format("\n{} call {}:{}", name_of(call), n, wrong);
    }
    if (std::ranges::none_of(outcomes, &Outcome::has_failed)) return summary;
  }
}

std::string walk_all(Bootstrap& control, const World& world, int rank) {
  // UCX would replace the replaced functions.
  setenv("UCX_MEM_EVENTS", "n", 1);
  std::string wrong;
  for (int call = 0; call < static_cast<int>(FailingCall::kNumCalls); ++call) {
    const Summary one = walk(control, world, static_cast<FailingCall>(call));
    if (rank == 0) {
      fmt::print("{}: {} attempts, {} failed, longest {} ms\n", name_of(static_cast<FailingCall>(call)),
                 one.num_attempts, one.num_failed, one.longest_ns / 1'000'000);
      std::fflush(stdout);
    }
    wrong += one.wrong;
  }
  return wrong;
}

/// Runs `body(rank, control)` in one process for each rank. Rank 0 reports what was wrong.
template <typename Body>
void run_ranks(int num_ranks, Body body) {
  const Meeting meeting = Meeting::prepare();
  std::vector<std::unique_ptr<ForkedRank>> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_unique<ForkedRank>([&, rank](const auto&) {
      if (rank != 0) meeting.close_listener();
      const auto control = create_tcp_bootstrap(meeting.options(rank, num_ranks, kTimeoutNs)).value();
      const std::string wrong = body(rank, *control);
      return rank != 0 || wrong.empty() ? Status() : Status(ErrorCode::kInternal, wrong);
    }));
  }
  meeting.close_listener();
  for (auto& rank : ranks) {
    const Status status = rank->result();
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

class CreateStep : public testing::TestWithParam<World> {};

TEST_P(CreateStep, ThatFailsFailsAllRanksWithTheRanksName) {
  const World& world = GetParam();
  run_ranks(world.num_ranks, [&](int rank, Bootstrap& control) { return walk_all(control, world, rank); });
}

INSTANTIATE_TEST_SUITE_P(Worlds, CreateStep,
                         testing::Values(World{.num_ranks = 4, .failing = {1}, .new_stride = 1},
                                         World{.num_ranks = 4, .failing = {1, 3}, .new_stride = 1},
                                         World{.num_ranks = 8, .failing = {6}, .new_stride = 5},
                                         World{.num_ranks = 8, .failing = {0, 5}, .new_stride = 5}),
                         world_name);

TEST(CreateFault, OfAWrongOptionReachesAllRanksWithTheRanksName) {
  const std::vector<void (*)(GroupOptions*)> mistakes = {
      [](GroupOptions* options) { options->backend = "none such"; },
      [](GroupOptions* options) { options->transport = "none such"; },
      [](GroupOptions* options) { options->net_devices = "nosuch0"; },
      [](GroupOptions* options) { options->tuning_file = "/no/such/file"; },
      [](GroupOptions* options) { options->arena_bytes = std::size_t{1} << 60; },
      [](GroupOptions* options) { options->ranks_per_node = 3; },
      [](GroupOptions* options) { options->timeout_ns = 0; }};
  run_ranks(4, [&](int rank, Bootstrap& control) {
    std::string wrong;
    for (std::size_t i = 0; i < mistakes.size(); ++i) {
      const auto outcomes = attempt(
          control,
          [&](GroupOptions* options) {
            if (rank == 2) mistakes[i](options);
          },
          [&] { return rank == 2; });
      wrong += check(outcomes);
      if (outcomes.front().code == ErrorCode::kOk) wrong += fmt::format("\nmistake {} was not noticed", i);
    }
    return wrong;
  });
}

TEST(CreateFault, OfAMissingNetworkLibraryReachesAllRanksWithTheRanksName) {
  run_ranks(4, [](int rank, Bootstrap& control) {
    if (rank == 2) setenv("FERRY_UCX_LIBRARY", "/no/such/library", 1);
    const auto outcomes = attempt(
        control, [](GroupOptions*) {}, [&] { return rank == 2; });
    return check(outcomes) + (outcomes.front().code == ErrorCode::kUnsupported ? "" : "\nnot refused");
  });
}

/// A limit of address space at any place between too little for anything and enough: UCX does not end the process.
TEST(CreateFault, ForWantOfAddressSpaceReachesAllRanksOrTheGroupForms) {
  static constexpr int kStepMib = 24;
  static constexpr int kMostMib = 2048;
  run_ranks(4, [](int rank, Bootstrap& control) {
    // UCX stays loaded.
    std::string wrong = check(attempt(
        control, [](GroupOptions*) {}, [] { return false; }));
    for (int mib = kStepMib; mib <= kMostMib; mib += kStepMib) {
      const auto outcomes = attempt(
          control,
          [&](GroupOptions*) {
            if (rank == 1) limit_address_space(static_cast<rlim_t>(mib) << 20);
          },
          [&] {
            if (rank == 1) limit_address_space(RLIM_INFINITY);
            return rank == 1;
          });
      if (const std::string one = check(outcomes); !one.empty()) wrong += fmt::format("\n{} MiB:{}", mib, one);
      if (outcomes.front().code == ErrorCode::kOk) return wrong;
    }
    return wrong + fmt::format("\nno group within {} MiB", kMostMib);
  });
}

}  // namespace
}  // namespace ferry::test
