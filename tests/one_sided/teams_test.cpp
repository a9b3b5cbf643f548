// Teams, and collective calls on them that end by their deadline.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "one_sided/world.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

class OneSidedTeams : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedTeams, ::testing::ValuesIn(all_worlds()),
                         [](const auto& instance) { return instance.param.name; });

constexpr std::int64_t kShortNs = kNsPerSecond;
constexpr int kManyTries = 60;

ErrorCode code_of(const Status& status) { return status.code(); }
template <typename T>
ErrorCode code_of(const Result<T>& result) {
  return result.status().code();
}

/// Repeats a call that others join late, until it does not end by its deadline.
template <typename Call>
auto repeat(const Call& call) {
  auto result = call();
  for (int i = 0; i < kManyTries && code_of(result) == ErrorCode::kTimeout; ++i) result = call();
  return result;
}

/// Each rank of a team adds to its own word on all ranks before a barrier; after it, every rank must see all words.
void meet_often(RankContext& context, OneSided& shm, const Team& team, std::span<std::uint64_t> words) {
  constexpr std::uint64_t kRounds = 10;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    for (int place = 0; place < team.num_ranks(); ++place) {
      context.expect_ok(
          shm.signal(team.world_rank(place), &words[static_cast<std::size_t>(team.rank())], 1, SignalOp::kAdd),
          "signal");
    }
    if (!context.expect_ok(repeat([&] { return shm.barrier(team); }), "barrier")) return;
    for (int place = 0; place < team.num_ranks(); ++place) {
      context.expect(words[static_cast<std::size_t>(place)] == round, "signals sent before the barrier are here");
    }
    if (!context.expect_ok(repeat([&] { return shm.barrier(team); }), "barrier")) return;
  }
}

TEST_P(OneSidedTeams, RanksThatWereInDifferentNumbersOfTeamsMeet) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    const auto num_ranks = static_cast<std::size_t>(shm.num_ranks());
    const std::span<std::uint64_t> first = block<std::uint64_t>(context, shm, num_ranks);
    const std::span<std::uint64_t> second = block<std::uint64_t>(context, shm, num_ranks);
    // Rank r has been in r more teams than rank 0 when all ranks split together.
    Result<Team> single = shm.split(shm.world(), shm.rank());
    if (!context.expect_ok(single.status(), "a team of one")) return;
    for (int i = 0; i < shm.rank(); ++i) context.expect_ok(shm.split(*single, 0).status(), "one more team");
    Result<Team> all = shm.split(shm.world(), 0, -shm.rank());
    if (!context.expect_ok(all.status(), "all")) return;
    Result<Team> halves = shm.split(*all, shm.rank() % 2);
    if (!context.expect_ok(halves.status(), "halves")) return;
    meet_often(context, shm, *all, first);
    meet_often(context, shm, *halves, second);
    context.expect_ok(shm.barrier(), "barrier");
  });
}

TEST_P(OneSidedTeams, HaveRoomForAsManyAsPromised) {
  run_world(GetParam(), [](RankContext& context, OneSided& shm) {
    constexpr int kFirstTeams = 3;  // world, node, rail
    Result<Team> last = shm.world();
    for (int i = kFirstTeams; i < kMaxTeams && last.ok(); ++i) last = shm.split(shm.world(), 0);
    if (!context.expect_ok(last.status(), "as many as promised")) return;
    const Status more = shm.split(shm.world(), 0).status();
    context.expect_code(more, ErrorCode::kCapacity, "one more");
    context.expect(more.message().find(std::to_string(kMaxTeams)) != std::string_view::npos, "names the limit");
    // A rank that joins no team needs no room.
    const Result<Team> none = shm.split(*last, -1);
    context.expect(none.ok() && !none->valid(), "none");
    context.expect_ok(shm.barrier(*last), "a barrier of the last team");
    context.expect_ok(shm.barrier(), "barrier");
  });
}

/// Five nodes. Requests from rank 0 to rank 3 are held while all ranks split the world: 1, 2 and 4 have shown their
/// arguments and wait for 0 and 3 in the last step, in which any rank may complete.
TEST(OneSidedTeamsApart, ASplitOfAnotherTeamBetweenASplitAndItsEndTakesNothingFromIt) {
  constexpr int kNumRanks = 5;
  net::LoopbackFaults faults;
  OneSidedOptions options;
  options.backend = "cpu";
  options.heap_bytes = std::size_t{1} << 20;
  options.ranks_per_node = 1;
  options.transport = "loopback";
  options.timeout_ns = kShortNs;
  run_ranks({.num_ranks = kNumRanks}, [&](RankContext& context) {
    const auto gather = [&] {
      context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "meeting of all ranks");
    };
    Result<std::shared_ptr<OneSided>> made = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(made.status(), "create")) return;
    OneSided& shm = **made;
    const int rank = shm.rank();
    const bool in_pair = rank == 1 || rank == 2;
    std::array<std::span<std::uint64_t>, 3> words;
    for (std::span<std::uint64_t>& block : words) {
      const auto taken = repeat([&] { return shm.allocate<std::uint64_t>(kNumRanks); });
      if (!context.expect_ok(taken.status(), "allocate")) return;
      block = *taken;
    }
    const Result<Team> pair = repeat([&] { return shm.split(shm.world(), in_pair ? 0 : -1); });
    if (!context.expect_ok(pair.status(), "the pair")) return;
    gather();
    if (rank == 0) faults.hold(0, 3);
    gather();
    const auto split_world = [&] { return shm.split(shm.world(), 0, -rank); };
    context.expect_code(split_world().status(), ErrorCode::kTimeout, "while 0 and 3 are apart");
    gather();
    Result<Team> small = Team();
    if (in_pair) {
      small = repeat([&] { return shm.split(*pair, 0); });
      if (context.expect_ok(small.status(), "a split of the pair")) meet_often(context, shm, *small, words[0]);
      // Other ranks may have used this rank's entry already: no other call on the team may come in between.
      constexpr auto kBad = ErrorCode::kInvalidArgument;
      context.expect_code(shm.split(shm.world(), 1).status(), kBad, "another colour");
      context.expect_code(shm.allocate(8).status(), kBad, "allocate");
      context.expect_code(shm.barrier(), kBad, "barrier");
    }
    gather();
    if (rank == 0) faults.release(0, 3);
    const Result<Team> big = repeat(split_world);
    if (!context.expect_ok(big.status(), "all")) return;
    context.expect(big->num_ranks() == kNumRanks && big->world_rank(0) == kNumRanks - 1, "all, in the order of keys");
    gather();
    // Both teams meet at once: they use different words.
    meet_often(context, shm, *big, words[1]);
    if (in_pair) meet_often(context, shm, *small, words[2]);
    context.expect_ok(repeat([&] { return shm.barrier(*big); }), "barrier");
    context.expect_ok(repeat([&] { return shm.destroy(); }), "destroy");
  });
}

TEST(OneSidedTeamsApart, ABarrierThatTimedOutIsMadeAgainBeforeAnythingElse) {
  OneSidedOptions options;
  options.backend = "cpu";
  options.heap_bytes = std::size_t{1} << 20;
  options.timeout_ns = kShortNs;
  run_ranks({.num_ranks = 3}, [&](RankContext& context) {
    const auto gather = [&] {
      context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "meeting of all ranks");
    };
    Result<std::shared_ptr<OneSided>> made = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(made.status(), "create")) return;
    OneSided& shm = **made;
    if (shm.rank() != 2) {
      context.expect_code(shm.barrier(), ErrorCode::kTimeout, "without the last");
      // As part of the barrier, allocate would meet the others one step off and read entries that they showed before.
      context.expect_code(shm.allocate(4096).status(), ErrorCode::kInvalidArgument, "allocate instead");
    }
    gather();
    context.expect_ok(repeat([&] { return shm.barrier(); }), "with the last");
    const Result<void*> data = repeat([&] { return shm.allocate(4096); });
    context.expect_ok(data.status(), "allocate");
    context.expect_ok(repeat([&] { return shm.destroy(); }), "destroy");
  });
}

}  // namespace
}  // namespace ferry::test
