// A rank that makes no progress for a while, but is not lost: calls that need it end by their deadline, name it, and
// leave their results unwritten. Calls between other ranks work, and all calls work once it continues.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "one_sided/world.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

/// Long enough to create a OneSided on a busy host.
constexpr std::int64_t kShortNs = kNsPerSecond;
constexpr int kManyTries = 60;
constexpr std::uint64_t kSentinel = 0x5EED'5EED'5EED'5EED;
constexpr std::uint64_t kBefore = 1000;      // initial value of words
constexpr std::size_t kManyWords = 150'000;  // more than a put copies, and more than a get requests at once
enum Word : std::size_t { kRead, kAdded, kSwapped, kStored, kLate, kNumWords };

void gather(RankContext& context, std::string_view what) {
  context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), what);
}

/// Repeats `call` until the other ranks have arrived.
Status repeat(const std::function<Status()>& call) {
  Status status = call();
  for (int i = 0; i < kManyTries && status.code() == ErrorCode::kTimeout; ++i) status = call();
  return status;
}

/// Symmetric memory of a test, with the sources and results of its calls: it outlives the OneSided, which may still
/// read it.
struct Memory {
  std::span<std::uint64_t> words;
  std::span<std::uint64_t> many;
  std::vector<std::uint64_t> source = std::vector<std::uint64_t>(kManyWords, kBefore + 1);
  std::vector<std::uint64_t> got = std::vector<std::uint64_t>(kManyWords, kSentinel);
  std::array<std::uint64_t, 2> fetched{kSentinel, kSentinel};
};

bool make(RankContext& context, OneSided& shm, Memory& memory) {
  memory.words = block<std::uint64_t>(context, shm, kNumWords);
  memory.many = block<std::uint64_t>(context, shm, kManyWords);
  if (memory.words.empty() || memory.many.empty()) return false;
  std::ranges::fill(memory.words, kBefore);
  return context.expect_ok(repeat([&] { return shm.barrier(); }), "barrier");
}

/// Makes calls that need an answer of `peer`, all at once, each in its own thread.
void call_in_vain(RankContext& context, OneSided& shm, int peer, Memory& memory) {
  const std::size_t many_bytes = kManyWords * sizeof(std::uint64_t);
  const std::span words = memory.words;
  const std::vector<std::pair<std::string, std::function<Status()>>> calls = {
      {"get", [&] { return shm.get(peer, memory.got.data(), &words[kRead], sizeof(std::uint64_t)); }},
      {"get of many", [&] { return shm.get(peer, memory.got.data(), memory.many.data(), many_bytes); }},
      {"fetch_add", [&] { return shm.fetch_add(peer, &words[kAdded], 1, &memory.fetched[0]); }},
      {"fetch_add, the result on the host", [&] { return shm.fetch_add(peer, &words[kAdded], 1).status(); }},
      {"compare_swap", [&] { return shm.compare_swap(peer, &words[kSwapped], 7, 8, &memory.fetched[1]); }},
      {"put that waits", [&] { return shm.put(peer, memory.many.data(), memory.source.data(), many_bytes); }},
      {"quiet", [&] { return shm.quiet(); }},
  };
  context.expect_ok(shm.signal(peer, &words[kStored], 1, SignalOp::kAdd), "signal");
  std::vector<Status> results(calls.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < calls.size(); ++i) threads.emplace_back([&, i] { results[i] = calls[i].second(); });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    context.expect_code(results[i], ErrorCode::kTimeout, calls[i].first);
    context.expect(results[i].peer() == peer, fmt::format("{} names rank {}", calls[i].first, results[i].peer()));
  }
}

void expect_untouched(RankContext& context, const Memory& memory, std::string_view when) {
  context.expect(std::ranges::count(memory.got, kSentinel) == std::ssize(memory.got),
                 fmt::format("the result of a get was written {}", when));
  context.expect(memory.fetched[0] == kSentinel && memory.fetched[1] == kSentinel,
                 fmt::format("the result of an atomic was written {}", when));
}

/// Expects that every kind of call works between this rank and `peer`.
void expect_usable(RankContext& context, OneSided& shm, int peer, const Memory& memory) {
  std::uint64_t got = 0;
  const std::uint64_t mine = kBefore + 77;
  const std::span words = memory.words;
  const Result<std::uint64_t> added = shm.fetch_add(peer, &words[kAdded], 5);
  context.expect_ok(added.status(), "fetch_add");
  const Result<std::uint64_t> after = shm.compare_swap(peer, &words[kAdded], 0, 0);
  context.expect(added.ok() && after.ok() && *after == *added + 5, "atomics see each other");
  context.expect_ok(shm.put(peer, &words[kLate], &mine, sizeof(mine)), "put");
  context.expect_ok(shm.fence(peer), "fence");
  context.expect_ok(shm.put_signal(peer, &words[kLate], &mine, sizeof(mine), &words[kStored], 1, SignalOp::kAdd),
                    "put_signal");
  context.expect_ok(shm.get(peer, &got, &words[kRead], sizeof(got)), "get");
  context.expect(got == kBefore, "the value that get returns");
}

OneSidedOptions short_options(const World& world) {
  OneSidedOptions options = options_of(world);
  options.timeout_ns = kShortNs;
  return options;
}

/// Holds all traffic between rank 0 and rank 2 for a while.
TEST(OneSidedStall, EndsCallsThatNeedTheRankAndNoOthers) {
  World world;
  for (const World& one : all_worlds()) {
    if (one.name == "loopback_3_nodes") world = one;
  }
  ASSERT_EQ(world.num_ranks, 3);
  net::LoopbackFaults faults;
  std::array<Memory, 3> memories;
  run_world(world, short_options(world), [&](RankContext& context, OneSided& shm) {
    Memory& memory = memories[static_cast<std::size_t>(context.rank())];
    if (!make(context, shm, memory)) return;
    gather(context, "all have theirs");
    if (context.rank() == 0) {
      faults.hold(0, 2);
      faults.hold(2, 0);
      call_in_vain(context, shm, 2, memory);
      expect_untouched(context, memory, "after the deadline");
      expect_usable(context, shm, 1, memory);
      // Calls behind a fence wait before they send anything.
      context.expect_ok(shm.fence(2), "fence");
      std::uint64_t got = kSentinel;
      const Status behind = shm.get(2, &got, &memory.words[kRead], sizeof(got));
      context.expect_code(behind, ErrorCode::kTimeout, "behind a fence");
      context.expect(behind.peer() == 2 && got == kSentinel, "it names the rank and has sent nothing");
      faults.release(0, 2);
      faults.release(2, 0);
      context.expect_ok(repeat([&] { return shm.quiet(); }), "quiet");
      expect_untouched(context, memory, "after late answers");
      expect_usable(context, shm, 2, memory);
    }
    gather(context, "rank 0 is through");
    context.expect_ok(repeat([&] { return shm.barrier(); }), "barrier");
    if (context.rank() == 2) {
      // Each call may have taken effect, at most once.
      const std::uint64_t added = memory.words[kAdded] - kBefore;
      context.expect(added >= 5 && added <= 7, fmt::format("added {}", added));
      context.expect(memory.words[kSwapped] == kBefore, "a swap that did not match");
      context.expect(memory.words[kStored] == kBefore + 2, "each signal arrives once");
    }
    gather(context, "all have looked");
  });
}

/// Each rank is a node.
OneSidedOptions apart(std::int64_t timeout_ns) {
  OneSidedOptions options;
  options.backend = "cpu";
  options.heap_bytes = std::size_t{4} << 20;
  options.ranks_per_node = 1;
  options.transport = "loopback";
  options.timeout_ns = timeout_ns;
  return options;
}

/// Quiet names the rank that does not answer, not one with which this rank is busy all the time.
TEST(OneSidedStall, AQuietNamesTheRankItWaitsFor) {
  net::LoopbackFaults faults;
  const OneSidedOptions options = apart(kShortNs);
  run_ranks({.num_ranks = 3}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    const std::span<std::uint64_t> many = block<std::uint64_t>(context, **shm, kManyWords);
    gather(context, "all have theirs");
    if (context.rank() == 0) {
      const std::vector<std::uint64_t> source(kManyWords, kBefore);
      std::atomic<bool> stop{false};
      constexpr std::size_t kManyBytes = kManyWords * sizeof(std::uint64_t);
      std::array<Status, 3> busy;
      std::vector<std::thread> threads;
      for (Status& status : busy) {
        threads.emplace_back([&] {
          while (!stop.load() && status.ok()) status = (*shm)->put(1, many.data(), source.data(), kManyBytes);
        });
      }
      faults.hold(0, 2);
      for (int i = 0; i < 3; ++i) {
        context.expect_ok((*shm)->signal(2, many.data(), 1, SignalOp::kAdd), "signal");
        const Status late = (*shm)->quiet();
        context.expect_code(late, ErrorCode::kTimeout, "quiet");
        context.expect(late.peer() == 2, fmt::format("names rank {}", late.peer()));
      }
      stop.store(true);
      for (std::thread& thread : threads) thread.join();
      for (const Status& status : busy) context.expect_ok(status, "puts to the other");
      faults.release(0, 2);
      context.expect_ok(repeat([&] { return (*shm)->quiet(); }), "quiet");
    }
    gather(context, "the end");
  });
}

TEST(OneSidedStall, AQuietOfARankWaitsForThatRankAlone) {
  net::LoopbackFaults faults;
  const OneSidedOptions options = apart(kShortNs);
  run_ranks({.num_ranks = 3}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    const std::span<std::uint64_t> many = block<std::uint64_t>(context, **shm, kManyWords);
    many.back() = static_cast<std::uint64_t>(context.rank());
    gather(context, "all have theirs");
    if (context.rank() == 0) {
      std::vector<std::uint64_t> got(kManyWords, kSentinel);
      std::uint64_t never = kSentinel;
      const std::uint64_t value = kBefore;
      faults.hold(2, 0);
      context.expect_ok((*shm)->get_nbi(2, &never, &many.back(), sizeof(never)), "get_nbi from the one held up");
      context.expect_ok((*shm)->put_nbi(2, many.data(), &value, sizeof(value)), "put_nbi to it");
      context.expect_ok((*shm)->put_nbi(1, many.data(), &value, sizeof(value)), "put_nbi");
      context.expect_ok((*shm)->get_nbi(1, got.data(), many.data(), kManyWords * sizeof(value)), "get_nbi");
      context.expect_ok((*shm)->quiet(1), "quiet of the rank that answers");
      context.expect(got.back() == 1, "its bytes have come");
      context.expect_ok((*shm)->quiet(0), "quiet of this rank itself");
      for (int i = 0; i < 2; ++i) {
        const Status late = i == 0 ? (*shm)->quiet(2) : (*shm)->quiet();
        context.expect_code(late, ErrorCode::kTimeout, "quiet of the other, or of all");
        context.expect(late.peer() == 2, fmt::format("names rank {}", late.peer()));
      }
      faults.release(2, 0);
      context.expect_ok(repeat([&] { return (*shm)->quiet(2); }), "quiet");
      context.expect(never == 2, "the get that was held up");
    }
    gather(context, "the end");
    context.expect(context.rank() == 0 || many.front() == kBefore, "the puts");
  });
}

/// The loss happens while quiet waits: that quiet reports it, and no later one.
TEST(OneSidedStall, ALossIsToldByOneQuiet) {
  for (const int variant : {0, 1, 2, 3}) {
    const bool gets = variant % 2 != 0;
    const bool of_rank = variant / 2 != 0;
    net::LoopbackFaults faults;
    const OneSidedOptions options = apart(60 * kNsPerSecond);
    std::uint64_t data = 5;
    run_ranks({.num_ranks = 3}, [&](RankContext& context) {
      Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
      if (!context.expect_ok(shm.status(), "create")) return;
      const std::span<std::uint64_t> words = block<std::uint64_t>(context, **shm, 1);
      const Result<Team> healthy = (*shm)->split((*shm)->world(), context.rank() < 2 ? 0 : 1);
      if (!context.expect_ok(healthy.status(), "split")) return;
      gather(context, "all have theirs");
      Status told;
      std::thread waiting;
      if (context.rank() == 0) {
        faults.hold(0, 2);
        context.expect_ok(gets ? (*shm)->get_nbi(2, &data, words.data(), sizeof(data))
                               : (*shm)->put_nbi(2, words.data(), &data, sizeof(data)),
                          "begin");
        waiting = std::thread([&] { told = of_rank ? (*shm)->quiet(2) : (*shm)->quiet(); });
      }
      gather(context, "something is under way to one");
      if (context.rank() == 2) shm->reset();
      if (context.rank() == 0) {
        waiting.join();
        context.expect_code(told, ErrorCode::kPeerLost, "the quiet that waited");
        context.expect(told.peer() == 2, fmt::format("names rank {}", told.peer()));
        context.expect_ok((*shm)->quiet(1), "quiet of another rank");
        context.expect_ok((*shm)->quiet(2), "quiet of the lost one");
        context.expect_ok((*shm)->quiet(), "the next quiet");
      }
      if (context.rank() < 2) context.expect_ok((*shm)->barrier(*healthy), "a barrier of the others");
      gather(context, "the end");
    });
  }
}

/// A quiet does not fail for a lost rank that has no outstanding requests.
TEST(OneSidedStall, ALateRankIsNamedWhereAnotherIsLost) {
  net::LoopbackFaults faults;
  const OneSidedOptions options = apart(kShortNs);
  run_ranks({.num_ranks = 3}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    const std::span<std::uint64_t> words = block<std::uint64_t>(context, **shm, 1);
    gather(context, "all have theirs");
    const std::uint64_t source = 5;
    if (context.rank() == 0) {
      faults.hold(0, 2);
      context.expect_ok((*shm)->put_nbi(2, words.data(), &source, sizeof(source)), "put_nbi");
    }
    gather(context, "something is under way to one");
    if (context.rank() == 2) shm->reset();
    gather(context, "it has left");
    if (context.rank() == 0) {
      std::uint64_t got = 0;
      const Status lost = repeat([&] { return (*shm)->get(2, &got, words.data(), sizeof(got)); });
      context.expect_code(lost, ErrorCode::kPeerLost, "a get from the lost rank");
      context.expect_code((*shm)->quiet(), ErrorCode::kPeerLost, "the quiet after requests to the lost rank");
      context.expect_ok((*shm)->quiet(), "the quiet after that one");
      faults.hold(0, 1);
      context.expect_ok((*shm)->signal(1, words.data(), 1, SignalOp::kAdd), "signal");
      const Status late = (*shm)->quiet();
      context.expect_code(late, ErrorCode::kTimeout, "quiet");
      context.expect(late.peer() == 1, fmt::format("names rank {}", late.peer()));
      faults.release(0, 1);
      context.expect_ok(repeat([&] { return (*shm)->quiet(); }), "quiet");
    }
    gather(context, "the end");
  });
}

/// Ranks 0 and 3 lose each other, and each gives up; the others still reach both.
TEST(OneSidedStall, AMeetingThatARankGivesUpEndsForAll) {
  net::LoopbackFaults faults;
  const OneSidedOptions options = apart(60 * kNsPerSecond);
  run_ranks({.num_ranks = 4}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    gather(context, "all have theirs");
    if (context.rank() == 0) faults.cut(0, 3);
    gather(context, "the connection is cut");
    const Status lost = (*shm)->allocate(64).status();
    context.expect_code(lost, ErrorCode::kTransport, "an allocate of all");
    const bool is_end = lost.peer() == 0 || lost.peer() == 3;
    context.expect(is_end && lost.peer() != context.rank(), fmt::format("names rank {}", lost.peer()));
    gather(context, "the end");
  });
}

class OneSidedStopped : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedStopped, ::testing::ValuesIn(process_worlds()),
                         [](const auto& instance) { return instance.param.name; });

bool is_stopped(pid_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string text;
  std::getline(file, text);
  // The name, in brackets, may hold anything.
  const std::size_t end = text.rfind(')');
  return end != std::string::npos && end + 2 < text.size() && text[end + 2] == 'T';
}

/// SIGSTOP stops the last rank; it is continued later.
TEST_P(OneSidedStopped, CollectiveCallsTakeNothingAndGoOnLater) {
  run_world(GetParam(), short_options(GetParam()), [&](RankContext& context, OneSided& shm) {
    Memory memory;
    if (!make(context, shm, memory)) return;
    const int victim = context.num_ranks() - 1;
    const pid_t mine = getpid();
    const auto pids = context.bootstrap()->all_gather(std::as_bytes(std::span(&mine, 1)), 60 * kNsPerSecond);
    if (!context.expect_ok(pids.status(), "ids of the processes")) return;
    pid_t process = 0;
    std::memcpy(&process, (*pids)[static_cast<std::size_t>(victim)].data(), sizeof(process));
    void* taken = nullptr;
    const auto allocate = [&] {
      const Result<void*> made = shm.allocate(64);
      if (made.ok()) taken = *made;
      return made.status();
    };
    // Address of the next block.
    const std::size_t page = 4096;
    const std::size_t many_bytes = (kManyWords * sizeof(std::uint64_t) + page - 1) / page * page;
    std::byte* const next_block = reinterpret_cast<std::byte*>(memory.many.data()) + many_bytes;
    if (context.rank() == 0) {
      kill(process, SIGSTOP);
      while (!is_stopped(process)) std::this_thread::yield();
      // Calls within the node need no other rank's help.
      const bool is_near = shm.peer_pointer(victim, memory.words.data()) != nullptr;
      const Status fetch = shm.fetch_add(victim, &memory.words[kAdded], 1, &memory.fetched[0]);
      context.expect_code(fetch, is_near ? ErrorCode::kOk : ErrorCode::kTimeout, "fetch_add");
      context.expect(is_near || (fetch.peer() == victim && memory.fetched[0] == kSentinel), "it names the rank");
      const Status quiet = shm.quiet();
      context.expect_code(quiet, is_near ? ErrorCode::kOk : ErrorCode::kTimeout, "quiet");
      context.expect(is_near || quiet.peer() == victim, "quiet names the rank");
      context.expect_ok(repeat([&] { return shm.fetch_add(1, &memory.words[kAdded], 1).status(); }), "another rank");
    }
    if (context.rank() != victim) {
      context.expect_code(allocate(), ErrorCode::kTimeout, "allocate");
      context.expect_code(shm.put(0, next_block, &mine, sizeof(mine)), ErrorCode::kInvalidArgument, "no block taken");
    }
    if (context.rank() == 0) kill(process, SIGCONT);
    gather(context, "the victim continues");
    context.expect_ok(repeat(allocate), "allocate");
    context.expect(taken == next_block, "the block is at the expected address");
    if (context.rank() == 0) expect_usable(context, shm, victim, memory);
    gather(context, "all have finished");
  });
}

}  // namespace
}  // namespace ferry::test
