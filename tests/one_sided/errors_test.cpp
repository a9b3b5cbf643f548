// Refused arguments, and calls that end when a rank is lost.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "one_sided/world.hpp"

namespace ferry::test {
namespace {

class OneSidedErrors : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedErrors, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(OneSidedErrors, BadArgumentsAreRefusedAndChangeNothing) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr auto kBad = ErrorCode::kInvalidArgument;
    const std::span<std::uint64_t> words = block<std::uint64_t>(context, shm, 16);
    const int next = (shm.rank() + 1) % shm.num_ranks();
    std::array<std::uint64_t, 32> local{};
    auto* misaligned = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(words.data()) + 4);
    context.expect_code(shm.put(-1, words.data(), local.data(), 8), kBad, "rank -1");
    context.expect_code(shm.put(shm.num_ranks(), words.data(), local.data(), 8), kBad, "a rank too high");
    context.expect_code(shm.put(next, local.data(), local.data(), 8), kBad, "dest is not symmetric");
    context.expect_code(shm.put(next, nullptr, local.data(), 8), kBad, "dest is null");
    context.expect_code(shm.put(next, words.data(), nullptr, 8), kBad, "source is null");
    context.expect_code(shm.put(next, words.data(), local.data(), 17 * 8), kBad, "past the end of the block");
    context.expect_code(shm.put(next, &words[15], local.data(), 16), kBad, "past the end, begun inside");
    context.expect_code(shm.put(next, words.data(), local.data(), SIZE_MAX), kBad, "a size that overflows");
    context.expect_code(shm.get(next, local.data(), words.data() + 16, 8), kBad, "source behind the block");
    context.expect_code(shm.get(next, nullptr, words.data(), 8), kBad, "dest of a get is null");
    context.expect_code(shm.get_nbi(next, local.data(), words.data(), 17 * 8), kBad, "get past the end");
    context.expect_code(shm.signal(next, misaligned, 1, SignalOp::kAdd), kBad, "a misaligned word");
    context.expect_code(shm.signal(next, &local[0], 1, SignalOp::kAdd), kBad, "a word that is not symmetric");
    context.expect_code(shm.signal(next, words.data(), 1, static_cast<SignalOp>(9)), kBad, "no such operation");
    context.expect_code(shm.fetch_add(next, misaligned, 1).status(), kBad, "fetch_add, misaligned");
    context.expect_code(shm.fetch_add(next, words.data(), 1, nullptr), kBad, "no address for the result");
    context.expect_code(shm.compare_swap(99, words.data(), 0, 1).status(), kBad, "compare_swap, no such rank");
    context.expect_code(shm.put_signal(next, words.data(), local.data(), 8, misaligned, 1, SignalOp::kAdd), kBad,
                        "put_signal, misaligned");
    context.expect_code(shm.wait_until(&local[0], Comparison::kEqual, 0), kBad,
                        "wait for a word that is not symmetric");
    context.expect_code(shm.wait_until(words.data(), static_cast<Comparison>(77), 0), kBad, "no such comparison");
    context.expect_code(shm.wait_until(words.data(), Comparison::kEqual, 0, {}, -5), kBad, "a deadline in the past");
    context.expect_code(shm.fence(99), kBad, "fence, no such rank");
    context.expect_code(shm.quiet(shm.num_ranks()), kBad, "quiet, no such rank");
    context.expect_code(shm.quiet(-1), kBad, "quiet, no rank");
    context.expect_code(shm.quiet(next, Stream{&local}), kBad, "quiet of a rank, a stream");
    context.expect_code(shm.quiet(Stream{&local}), kBad, "a stream on a backend that has none");
    context.expect_code(shm.barrier(Team()), kBad, "no team");
    context.expect_code(shm.allocate<std::uint64_t>(SIZE_MAX / 4).status(), kBad, "a count that overflows");
    context.expect_ok(shm.barrier(), "barrier");
    for (const std::uint64_t word : words) context.expect(word == 0, "nothing was changed");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedErrors, AFreedBlockIsRefusedAsOne) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const int next = (shm.rank() + 1) % shm.num_ranks();
    std::array<std::uint64_t, 4> local{};
    // The first block of the heap, and one that follows another.
    const std::array blocks{block<std::uint64_t>(context, shm, 4), block<std::uint64_t>(context, shm, 4)};
    for (const std::span<std::uint64_t> freed : blocks) {
      if (!context.expect_ok(shm.free(freed.data()), "free")) return;
    }
    const auto expect_freed = [&](const Status& status, std::string_view call) {
      context.expect_code(status, ErrorCode::kInvalidArgument, call);
      context.expect(status.message().find("freed") != std::string_view::npos, status.to_string());
    };
    for (const std::span<std::uint64_t> freed : blocks) {
      std::uint64_t* const word = freed.data();
      expect_freed(shm.put(next, word, local.data(), 8), "put");
      expect_freed(shm.put(next, word, local.data(), 0), "put of no bytes");
      expect_freed(shm.put_nbi(next, &freed[1], local.data(), 8), "put_nbi");
      expect_freed(shm.get(next, local.data(), word, 8), "get");
      expect_freed(shm.get_nbi(next, local.data(), word, 8), "get_nbi");
      expect_freed(shm.put_signal(next, word, local.data(), 8, word, 1, SignalOp::kAdd), "put_signal");
      expect_freed(shm.signal(next, word, 1, SignalOp::kAdd), "signal");
      expect_freed(shm.fetch_add(next, word, 1).status(), "fetch_add");
      expect_freed(shm.compare_swap(next, word, 0, 1).status(), "compare_swap");
      expect_freed(shm.wait_until(word, Comparison::kEqual, 0), "wait_until");
      expect_freed(shm.test(word, Comparison::kEqual, 0).status(), "test");
      expect_freed(shm.free(word), "free");
      context.expect(shm.peer_pointer(next, word) == nullptr, "peer_pointer");
    }
    const std::span<std::uint64_t> again = block<std::uint64_t>(context, shm, 4);
    context.expect(again.data() == blocks[0].data(), "the first block is taken again");
    context.expect_ok(shm.put(next, again.data(), local.data(), 8), "put");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedErrors, NothingWorksAfterDestroy) {
  run_ranks({.kind = GetParam().kind, .num_ranks = GetParam().num_ranks}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options_of(GetParam()));
    if (!context.expect_ok(shm.status(), "create")) return;
    const std::span<std::uint64_t> words = block<std::uint64_t>(context, **shm, 1);
    context.expect_ok((*shm)->destroy(), "destroy");
    std::uint64_t value = 0;
    constexpr auto kBad = ErrorCode::kInvalidArgument;
    context.expect_code((*shm)->put(0, words.data(), &value, 8), kBad, "put");
    context.expect_code((*shm)->quiet(), kBad, "quiet");
    context.expect_code((*shm)->barrier(), kBad, "barrier");
    context.expect_code((*shm)->allocate(1).status(), kBad, "allocate");
    context.expect_code((*shm)->destroy(), kBad, "destroy");
    context.expect((*shm)->peer_pointer(0, words.data()) == nullptr, "peer_pointer");
  });
}

TEST(OneSidedCreate, OptionsMustAgree) {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    OneSidedOptions options;
    options.backend = "cpu";
    options.heap_bytes = context.rank() == 0 ? 8192 : 12288;
    const Status status = OneSided::create(context.bootstrap(), options).status();
    context.expect_code(status, ErrorCode::kInvalidArgument, "heaps of different sizes");
    context.expect(status.message().find("12288") != std::string_view::npos, "the message names them");
    options.heap_bytes = 0;
    context.expect_code(OneSided::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                        "no heap");
    options.heap_bytes = 4096;
    options.backend = "abacus";
    context.expect_code(OneSided::create(context.bootstrap(), options).status(), ErrorCode::kInvalidArgument,
                        "no such backend");
  });
  EXPECT_EQ(OneSided::create(nullptr).status().code(), ErrorCode::kInvalidArgument);
}

class OneSidedEnd : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedEnd, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

/// Programs end without destroy: a rank that has returned from the last call exits while others are still in it.
TEST_P(OneSidedEnd, ALastCallNeedsNoDestroy) {
  const World& world = GetParam();
  const int num_rounds = world.transport == "ucx" ? 9 : 51;  // connections take long
  run_ranks({.kind = world.kind, .num_ranks = world.num_ranks}, [&](RankContext& context) {
    for (int round = 0; round < num_rounds; ++round) {
      Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options_of(world));
      if (!context.expect_ok(shm.status(), "create")) return;
      Status last;
      if (round % 3 == 0) last = (*shm)->barrier();
      if (round % 3 == 1) last = (*shm)->allocate(64).status();
      if (round % 3 == 2) last = (*shm)->barrier((*shm)->rail());
      if (!context.expect_ok(last, "the last call")) return;
    }
  });
}

/// Calls that a lost rank must end.
enum class Waiting { kWaitUntil, kBarrier, kQuiet, kGet };

void lose_a_rank(RankContext& context, const World& world, Waiting waiting) {
  OneSidedOptions options = options_of(world);
  options.timeout_ns = 30 * kNsPerSecond;
  Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
  if (!context.expect_ok(shm.status(), "create")) return;
  const std::span<std::uint64_t> words = block<std::uint64_t>(context, **shm, 4096);
  const int lost = context.num_ranks() - 1;
  const std::size_t num_mine = words.size() / static_cast<std::size_t>(context.num_ranks());
  const std::span<std::uint64_t> mine = words.subspan(static_cast<std::size_t>(context.rank()) * num_mine, num_mine);
  const Status met = context.bootstrap()->all_gather({}, options.timeout_ns).status();
  if (!context.expect_ok(met, "all have their block")) return;
  if (context.rank() == lost) {
    if (world.kind == RankKind::kProcesses) _exit(0);
    shm->reset();
    return;
  }
  Status status;
  std::vector<std::uint64_t> got(num_mine);
  const std::size_t num_bytes = got.size() * sizeof(got[0]);
  const auto put = [&] {
    const Status begun = (*shm)->put_nbi(lost, mine.data(), got.data(), num_bytes);
    return begun.ok() ? (*shm)->quiet() : begun;
  };
  const auto get = [&] { return (*shm)->get(lost, got.data(), mine.data(), num_bytes); };
  // Copies inside a node need no answer of another rank.
  const bool is_near = (*shm)->peer_pointer(lost, mine.data()) != nullptr;
  switch (waiting) {
    case Waiting::kWaitUntil:
      status = (*shm)->wait_until(words.data(), Comparison::kEqual, 1);
      break;
    case Waiting::kBarrier:
      status = (*shm)->barrier();
      break;
    case Waiting::kQuiet:
    case Waiting::kGet:
      // Repeats until a call finds the rank lost; all later ones fail as well.
      while (status.ok() && !is_near) status = waiting == Waiting::kQuiet ? put() : get();
      if (!is_near) break;
      status = (*shm)->wait_until(words.data(), Comparison::kEqual, 1);
      context.expect_ok(waiting == Waiting::kQuiet ? put() : get(), "a copy inside the node, after the loss");
      break;
  }
  const bool typed = status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kTransport;
  context.expect(typed && status.peer() == lost, "a lost rank: " + std::string(status.to_string()));
}

class OneSidedLoss : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedLoss, ::testing::ValuesIn([] {
                           std::vector<World> worlds;
                           for (const World& world : all_worlds()) {
                             if (world.num_ranks > 1) worlds.push_back(world);
                           }
                           return worlds;
                         }()),
                         [](const auto& instance) { return instance.param.name; });

void lose_a_rank(const World& world, Waiting waiting) {
  run_ranks({.kind = world.kind, .num_ranks = world.num_ranks},
            [&](RankContext& context) { lose_a_rank(context, world, waiting); });
}

TEST_P(OneSidedLoss, EndsWaitUntil) { lose_a_rank(GetParam(), Waiting::kWaitUntil); }

TEST_P(OneSidedLoss, EndsABarrier) { lose_a_rank(GetParam(), Waiting::kBarrier); }

TEST_P(OneSidedLoss, EndsQuiet) { lose_a_rank(GetParam(), Waiting::kQuiet); }

TEST_P(OneSidedLoss, EndsAGet) { lose_a_rank(GetParam(), Waiting::kGet); }

}  // namespace
}  // namespace ferry::test
