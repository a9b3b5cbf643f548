// Words: atomics, waits, teams.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "one_sided/world.hpp"

namespace ferry::test {
namespace {

class OneSidedWords : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedWords, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(OneSidedWords, FetchAddGivesEachNumberOnce) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 50;
    const auto num_ranks = static_cast<std::uint64_t>(shm.num_ranks());
    const std::span<std::uint64_t> counters = block<std::uint64_t>(context, shm, 1);
    const std::span<std::uint64_t> claimed = block<std::uint64_t>(context, shm, kRounds * num_ranks);
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      for (int home = 0; home < shm.num_ranks(); ++home) {
        const Result<std::uint64_t> number = shm.fetch_add(home, counters.data(), 1);
        if (!context.expect_ok(number.status(), "fetch_add")) return;
        if (!context.expect(*number < claimed.size(), "a number in range")) return;
        std::uint64_t before = 7;
        const auto me = static_cast<std::uint64_t>(shm.rank()) + 1;
        if (!context.expect_ok(shm.compare_swap(home, &claimed[*number], 0, me, &before), "compare_swap")) return;
        context.expect(before == 0, "no other rank got that number");
      }
    }
    context.expect_ok(shm.barrier(), "barrier");
    context.expect(counters[0] == kRounds * num_ranks, "the sum");
    for (const std::uint64_t rank : claimed) context.expect(rank != 0, "every number was given");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedWords, SignalsOfManyWritersAddUp) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 300;
    const std::span<std::uint64_t> sum = block<std::uint64_t>(context, shm, 1);
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      for (int rank = 0; rank < shm.num_ranks(); ++rank) {
        if (!context.expect_ok(shm.signal(rank, sum.data(), 1, SignalOp::kAdd), "signal")) return;
      }
    }
    const std::uint64_t total = kRounds * static_cast<std::uint64_t>(shm.num_ranks());
    context.expect_ok(shm.wait_until(sum.data(), Comparison::kGreaterEqual, total), "wait_until");
    context.expect_ok(shm.barrier(), "barrier");
    context.expect(sum[0] == total, "no signal counted twice");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedWords, ALockOfCompareSwapExcludes) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr std::uint64_t kRounds = 12;
    const std::span<std::uint64_t> lock = block<std::uint64_t>(context, shm, 1);
    const std::span<std::uint64_t> count = block<std::uint64_t>(context, shm, 1);
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      while (true) {
        const Result<std::uint64_t> before = shm.compare_swap(0, lock.data(), 0, 1);
        if (!context.expect_ok(before.status(), "compare_swap")) return;
        if (*before == 0) break;
      }
      std::array<std::uint64_t, 1> value{};
      context.expect_ok(shm.get<std::uint64_t>(0, value, count.data()), "get");
      ++value[0];
      context.expect_ok(shm.put<std::uint64_t>(0, count.data(), value), "put");
      context.expect_ok(shm.fence(0), "fence");
      context.expect_ok(shm.signal(0, lock.data(), 0, SignalOp::kSet), "unlock");
    }
    context.expect_ok(shm.barrier(), "barrier");
    std::array<std::uint64_t, 1> value{};
    context.expect_ok(shm.get<std::uint64_t>(0, value, count.data()), "get");
    context.expect(value[0] == kRounds * static_cast<std::uint64_t>(shm.num_ranks()), "no increment was lost");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedWords, WaitsCompareUnsigned) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint64_t> word = block<std::uint64_t>(context, shm, 1);
    const int next = (shm.rank() + 1) % shm.num_ranks();
    constexpr std::uint64_t kLarge = ~std::uint64_t{0} - 1;
    context.expect_ok(shm.signal(next, word.data(), kLarge, SignalOp::kSet), "signal");
    for (const auto& [comparison, value] :
         {std::pair{Comparison::kEqual, kLarge}, std::pair{Comparison::kNotEqual, std::uint64_t{0}},
          std::pair{Comparison::kGreater, kLarge - 1}, std::pair{Comparison::kGreaterEqual, kLarge},
          std::pair{Comparison::kLess, kLarge + 1}, std::pair{Comparison::kLessEqual, kLarge}}) {
      context.expect_ok(shm.wait_until(word.data(), comparison, value), "wait_until");
      const Result<bool> holds = shm.test(word.data(), comparison, value);
      context.expect(holds.ok() && *holds, "test");
    }
    const Result<bool> holds = shm.test(word.data(), Comparison::kLess, 5);
    context.expect(holds.ok() && !*holds, "a large number is not less than a small one");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedWords, AWaitEndsAtItsDeadline) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const std::span<std::uint64_t> word = block<std::uint64_t>(context, shm, 1);
    const Status late = shm.wait_until(word.data(), Comparison::kEqual, 1, {}, 20'000'000);
    context.expect_code(late, ErrorCode::kTimeout, "a word that no rank writes");
    context.expect(late.message().find("20 ms") != std::string_view::npos, "the message names the deadline");
    // The timeout breaks nothing.
    context.expect_ok(shm.signal(shm.rank(), word.data(), 1, SignalOp::kSet), "signal");
    context.expect_ok(shm.wait_until(word.data(), Comparison::kEqual, 1), "wait_until");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedWords, TeamsMeetByThemselves) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const Topology& topology = shm.topology();
    context.expect(shm.world().num_ranks() == topology.num_ranks && shm.world().rank() == shm.rank(), "world");
    context.expect(shm.node().num_ranks() == topology.ranks_per_node, "node");
    context.expect(shm.rail().num_ranks() == topology.num_nodes(), "rail");
    context.expect(shm.rail().world_rank(shm.rail().rank()) == shm.rank(), "this rank's place in its rail");

    // A team in reverse order, without the last rank.
    const bool joins = shm.rank() + 1 < shm.num_ranks();
    Result<Team> team = shm.split(shm.world(), joins ? 3 : -1, -shm.rank());
    if (!context.expect_ok(team.status(), "split")) return;
    context.expect(team->valid() == joins, "all but the last rank take part");
    const std::span<std::uint64_t> sum = block<std::uint64_t>(context, shm, 1);
    for (std::uint64_t round = 1; joins && round <= 5; ++round) {
      context.expect(team->world_rank(team->rank()) == shm.rank(), "places by key");
      context.expect(team->world_rank(0) == shm.num_ranks() - 2, "the highest rank has the lowest key");
      for (int place = 0; place < team->num_ranks(); ++place) {
        context.expect_ok(shm.signal(team->world_rank(place), sum.data(), 1, SignalOp::kAdd), "signal");
      }
      if (!context.expect_ok(shm.barrier(*team), "barrier of the team")) return;
      context.expect(sum[0] >= round * static_cast<std::uint64_t>(team->num_ranks()), "all have arrived");
      if (!context.expect_ok(shm.barrier(*team), "barrier of the team")) return;
    }
    // Two halves at once, and a team split from a team.
    Result<Team> half = shm.split(shm.world(), shm.rank() % 2);
    if (!context.expect_ok(half.status(), "split in two")) return;
    Result<Team> alone = shm.split(*half, shm.rank());
    if (!context.expect_ok(alone.status(), "split of a split")) return;
    context.expect(alone->num_ranks() == 1, "a team of one");
    context.expect_ok(shm.barrier(*alone), "its barrier");
    context.expect_ok(shm.barrier(*half), "barrier of the half");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedWords, MemoryComesBackZeroedAndAtTheSameOffset) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    Result<void*> first = shm.allocate(10'000);
    Result<void*> second = shm.allocate(1);
    if (!context.expect_ok(first.status(), "allocate") || !context.expect_ok(second.status(), "allocate")) return;
    const int next = (shm.rank() + 1) % shm.num_ranks();
    const std::vector<std::uint8_t> ones(10'000, 1);
    context.expect_ok(shm.put_nbi(next, *first, ones.data(), ones.size()), "put_nbi");
    context.expect_ok(shm.free(*first), "free");
    Result<std::span<std::uint8_t>> again = shm.allocate<std::uint8_t>(10'000);
    if (!context.expect_ok(again.status(), "allocate")) return;
    context.expect(again->data() == *first, "the same range");
    context.expect(std::ranges::count(*again, 0) == 10'000, "zeroed");
    context.expect_ok(shm.free(nullptr), "free of nothing");
    std::uint64_t other = 0;
    context.expect_code(shm.free(&other), ErrorCode::kInvalidArgument, "not a block");
    context.expect_code(shm.allocate(std::size_t{1} << 40).status(), ErrorCode::kCapacity, "more than there is");
    context.expect_ok(shm.free(*second), "free");
  });
}

TEST_P(OneSidedWords, DisagreementNamesBothValues) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    if (shm.num_ranks() == 1) return;
    const bool odd = shm.rank() == shm.num_ranks() - 1;
    const Status status = shm.allocate(odd ? 4711 : 4096).status();
    context.expect_code(status, ErrorCode::kInvalidArgument, "ranks that ask for different sizes");
    context.expect(status.message().find("4711") != std::string_view::npos &&
                       status.message().find("4096") != std::string_view::npos,
                   "the message names both sizes");
    // The error is the same on every rank, and no block is taken.
    Result<void*> block = shm.allocate(8);
    if (!context.expect_ok(block.status(), "allocate")) return;
    const Status other = odd ? shm.allocate(8).status() : shm.free(*block);
    context.expect_code(other, ErrorCode::kInvalidArgument, "different calls");
    context.expect_ok(shm.free(*block), "free");
  });
}

TEST_P(OneSidedWords, ABarrierMeetsNoOtherCall) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    if (shm.num_ranks() == 1) return;
    const bool odd = shm.rank() == shm.num_ranks() - 1;
    for (int round = 0; round < 3; ++round) {
      const Status allocates = odd ? shm.barrier() : shm.allocate(64).status();
      context.expect_code(allocates, ErrorCode::kInvalidArgument, "a barrier and allocate");
      context.expect(allocates.message().find("some call barrier") != std::string_view::npos, allocates.to_string());
      const Status splits = odd ? shm.split(shm.world(), 0, 0).status() : shm.barrier();
      context.expect_code(splits, ErrorCode::kInvalidArgument, "a barrier and split");
      context.expect_ok(shm.barrier(), "barrier");
      // The failed calls took no block, so the next block has the same address on all ranks.
      const auto word = shm.allocate<std::uint64_t>(1);
      if (!context.expect_ok(word.status(), "allocate")) return;
      context.expect_ok(shm.signal((shm.rank() + 1) % shm.num_ranks(), word->data(), 1, SignalOp::kAdd), "signal");
      context.expect_ok(shm.wait_until(word->data(), Comparison::kEqual, 1), "wait_until");
      context.expect_ok(shm.free(word->data()), "free");
    }
  });
}

/// A rank that leaves makes no call that conflicts with a barrier: ranks in a barrier meet it, or find that it has
/// left. With so many ranks, some leave before they have heard from all others and cannot see which call those made.
TEST(OneSidedLeaving, IsNoOtherCallThanABarrier) {
  constexpr int kRanks = 13;
  constexpr int kLeaving = 9;
  for (int round = 0; round < 5; ++round) {
    run_ranks({.num_ranks = kRanks}, [](RankContext& context) {
      const auto shm = OneSided::create(context.bootstrap(), {.backend = "cpu", .heap_bytes = 1 << 20});
      if (!context.expect_ok(shm.status(), "create")) return;
      context.expect_ok((*shm)->allocate(64).status(), "allocate");
      if (context.rank() >= kLeaving) {
        const Status met = (*shm)->barrier();
        context.expect(met.ok() || met.code() == ErrorCode::kPeerLost, met.to_string());
      }
      (void)(*shm)->destroy();
    });
  }
}

}  // namespace
}  // namespace ferry::test
