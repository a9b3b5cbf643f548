// Errors that misbehaving ranks can cause on this rank, and calls that end by their deadline.
#include "one_sided/fabric.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "core/create_together.hpp"
#include "core/group_options.hpp"
#include "node/futex.hpp"
#include "one_sided/cpu_backend.hpp"
#include "one_sided/world.hpp"
#include "support/loopback_faults.hpp"

namespace ferry::test {
namespace {

/// Long enough to create a OneSided on a busy host.
constexpr std::int64_t kShortNs = kNsPerSecond;
constexpr int kMaxTries = 60;

std::vector<World> worlds_of_three() {
  std::vector<World> worlds;
  for (const World& world : all_worlds()) {
    if (world.num_ranks > 2 && world.kind == RankKind::kThreads && !world.scrambled) worlds.push_back(world);
  }
  return worlds;
}

class OneSidedDeadline : public ::testing::TestWithParam<World> {};
INSTANTIATE_TEST_SUITE_P(, OneSidedDeadline, ::testing::ValuesIn(worlds_of_three()),
                         [](const auto& instance) { return instance.param.name; });

/// All ranks but the last make the call, which ends by its deadline; then all ranks repeat it until it succeeds.
void be_late(RankContext& context, const std::function<Status()>& call) {
  if (context.rank() != context.num_ranks() - 1) context.expect_code(call(), ErrorCode::kTimeout, "without the last");
  context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "the last rank arrives");
  Status status = call();
  for (int i = 0; i < kMaxTries && status.code() == ErrorCode::kTimeout; ++i) status = call();
  context.expect_ok(status, "with the last");
}

Result<void*> repeat_allocate(OneSided& shm) {
  Result<void*> made = shm.allocate(4096);
  for (int i = 0; i < kMaxTries && made.status().code() == ErrorCode::kTimeout; ++i) made = shm.allocate(4096);
  return made;
}

TEST_P(OneSidedDeadline, ACollectiveCallThatTimedOutIsTakenUpByTheNext) {
  OneSidedOptions options = options_of(GetParam());
  options.timeout_ns = kShortNs;
  run_ranks({.kind = GetParam().kind, .num_ranks = GetParam().num_ranks}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    be_late(context, [&] { return (*shm)->barrier(); });
    Result<void*> data = static_cast<void*>(nullptr);
    be_late(context, [&] {
      data = (*shm)->allocate(4096);
      return data.status();
    });
    if (!context.expect_ok(data.status(), "allocate")) return;
    Result<Team> team = Team();
    be_late(context, [&] {
      team = (*shm)->split((*shm)->world(), 0);
      return team.status();
    });
    context.expect(team.ok() && team->num_ranks() == context.num_ranks(), "the team has all ranks");
    const Result<void*> other = repeat_allocate(**shm);
    if (!context.expect_ok(other.status(), "another block")) return;
    be_late(context, [&] { return (*shm)->free(*other); });
    context.expect_code((*shm)->put(0, *other, *data, 8), ErrorCode::kInvalidArgument, "a block that is free");
    // All ranks can use the block, and barriers work as before.
    auto* const words = static_cast<std::uint64_t*>(*data);
    const int next = (context.rank() + 1) % context.num_ranks();
    for (std::uint64_t round = 1; round <= 20; ++round) {
      context.expect_ok((*shm)->put<std::uint64_t>(next, words, std::array{round}), "put");
      context.expect_ok((*shm)->barrier(), "barrier");
      context.expect(words[0] == round, "the word put before the barrier");
      context.expect_ok((*shm)->barrier(), "barrier");
    }
    context.expect_ok((*shm)->destroy(), "destroy");
  });
}

/// Rank 0 makes a call before the others do, and then calls destroy.
void destroy_after_timeout(const World& world, const std::function<Status(OneSided&)>& call) {
  OneSidedOptions options = options_of(world);
  options.timeout_ns = kShortNs;
  run_ranks({.kind = world.kind, .num_ranks = world.num_ranks}, [&](RankContext& context) {
    Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
    if (!context.expect_ok(shm.status(), "create")) return;
    const bool is_last = context.rank() == context.num_ranks() - 1;
    if (context.rank() == 0) context.expect_code(call(**shm), ErrorCode::kTimeout, "without the others");
    context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "the others arrive");
    if (context.rank() != 0) context.expect_ok(call(**shm), "the call that rank 0 was in");
    // Only a destroy that meets all ranks succeeds, and the last rank calls it after the others have returned from
    // theirs.
    if (!is_last) context.expect(!(*shm)->destroy().ok(), "destroy, without the last");
    context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "the others are back");
  });
}

TEST_P(OneSidedDeadline, DestroyIsNoBarrierThatTimedOut) {
  destroy_after_timeout(GetParam(), [](OneSided& shm) { return shm.barrier(); });
}

TEST_P(OneSidedDeadline, DestroyIsNoAllocateThatTimedOut) {
  destroy_after_timeout(GetParam(), [](OneSided& shm) { return shm.allocate(4096).status(); });
}

Result<std::unique_ptr<one_sided::Fabric>> create_fabric(RankContext& context, std::int64_t timeout_ns) {
  BackendContext base;
  base.bootstrap = context.bootstrap().get();
  base.topology = {context.rank(), context.num_ranks(), 1};
  base.options.transport = "loopback";
  base.options.timeout_ns = timeout_ns;
  return one_sided::Fabric::create(base, 4096);
}

one_sided::Entry entry_of(int number) {
  one_sided::Entry entry{};
  entry.fill(static_cast<std::byte>(number));
  return entry;
}

/// Requests from rank 0 to rank 3 are held: neither rank finishes showing its entry, and the others wait for them in
/// the following barrier. The barrier before it completes, since of five ranks 0 notifies only 1, 2 and 4.
TEST(OneSidedFabric, AnExchangeThatTimedOutGoesOnWhereItWasWhateverOtherTeamsDo) {
  constexpr int kNumRanks = 5;
  constexpr int kFewTries = 10;  // other ranks wait for these tries
  net::LoopbackFaults faults;
  run_ranks({.num_ranks = kNumRanks}, [&](RankContext& context) {
    const auto meet = [&] {
      context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "meeting of all ranks");
    };
    Result<std::unique_ptr<one_sided::Fabric>> fabric = create_fabric(context, kShortNs);
    if (!context.expect_ok(fabric.status(), "create")) return;
    const int rank = context.rank();
    const one_sided::TeamState world{.ranks = {0, 1, 2, 3, 4}, .slots = {0, 3, 0, 4, 5}, .my_place = rank};
    const one_sided::TeamState pair{.ranks = {1, 2}, .slots = {0, 1}, .my_place = rank - 1};
    const auto exchange = [&] { return (*fabric)->exchange(world, entry_of(rank + 1), "exchange"); };
    if (rank == 0) faults.hold(0, 3);
    meet();
    context.expect_code(exchange().status(), ErrorCode::kTimeout, "while 0 and 3 are apart");
    meet();
    if (rank == 1 || rank == 2) {
      context.expect_ok((*fabric)->exchange(pair, entry_of(rank + 10), "exchange").status(), "another team");
    }
    meet();
    if (rank == 0) faults.release(0, 3);
    Result<std::vector<one_sided::Entry>> entries = exchange();
    for (int i = 0; i < kFewTries && entries.status().code() == ErrorCode::kTimeout; ++i) entries = exchange();
    // No later call may be taken for the missing one.
    meet();
    if (context.expect_ok(entries.status(), "together again")) {
      for (int from = 0; from < kNumRanks; ++from) {
        context.expect((*entries)[static_cast<std::size_t>(from)] == entry_of(from + 1), "the rank's entry");
      }
    }
    context.expect_ok((*fabric)->barrier(world, "barrier"), "a barrier after the exchange");
    context.expect_ok((*fabric)->leave(world, "leave"), "leave");
  });
}

/// Source that keeps the network busy with requests this rank does not wait for.
class Busy final : public one_sided::RequestSource {
 public:
  const one_sided::NetworkRequest* front(const one_sided::CanIssue& can_issue) override {
    return can_issue(fence_.peer) ? &fence_ : nullptr;
  }
  void taken() override {}
  bool needs_polling() const override { return false; }

 private:
  one_sided::NetworkRequest fence_{.kind = one_sided::NetworkRequest::Kind::kFence, .peer = 1};
};

TEST(OneSidedFabric, AWaitEndsByItsDeadlineHoweverBusyTheNetworkIs) {
  constexpr std::int64_t kTimeoutNs = 1'000'000;
  constexpr int kRounds = 100;
  constexpr int kMaxLate = 50;  // rounds whose thread was descheduled before its wait; many on a busy machine
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    Result<std::unique_ptr<one_sided::Fabric>> fabric = create_fabric(context, 60 * kNsPerSecond);
    if (!context.expect_ok(fabric.status(), "create")) return;
    if (context.rank() == 0) {
      Busy busy;
      (*fabric)->driver()->attach(&busy);
      int num_late = 0;
      for (int round = 0; round < kRounds; ++round) {
        const std::int64_t begin_ns = node::monotonic_ns();
        int num_looks_after = 0;
        const Status status = (*fabric)->wait({.operation = "wait",
                                               .what = [] { return one_sided::Fabric::Awaited{"nothing"}; },
                                               .ranks = (*fabric)->all_ranks(),
                                               .timeout_ns = kTimeoutNs},
                                              [&] {
                                                num_looks_after += node::monotonic_ns() - begin_ns > 2 * kTimeoutNs;
                                                return false;
                                              });
        context.expect_code(status, ErrorCode::kTimeout, "a condition that never holds");
        // A look at the clock follows each look at the condition.
        num_late += num_looks_after > 2;
      }
      context.expect(num_late <= kMaxLate, "rounds that went on: " + std::to_string(num_late));
      (*fabric)->driver()->detach(&busy);
    }
    context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "the end");
  });
}

/// Shows a forged entry in a split.
void split_with_forged_entry(RankContext& context, std::size_t heap_bytes, std::uint64_t next_id) {
  const std::string heap_text = std::to_string(heap_bytes);
  GroupOptions base;
  base.backend = "cpu";
  base.ranks_per_node = context.num_ranks();
  base.timeout_ns = 60 * kNsPerSecond;
  base.tuning_file = "builtin";
  const auto create_mine = [&](Bootstrap& shared) -> Result<std::unique_ptr<one_sided::Backend>> {
    const auto heaps = gather_or_fail(shared, {}, std::as_bytes(std::span(heap_text)), base.timeout_ns);
    if (!heaps.ok()) return heaps.status();
    const Result<AgreedOptions> agreed = agree_on_options(shared, base);
    if (!agreed.ok()) return agreed.status();
    return one_sided::cpu_backend_factory().create({{&shared, agreed->topology, base, {}}, heap_bytes});
  };
  Result<std::unique_ptr<one_sided::Backend>> backend =
      create_together(*context.bootstrap(), "a forger", base.timeout_ns, create_mine);
  if (!context.expect_ok(backend.status(), "backend")) return;
  const one_sided::TeamState world{.ranks = {0, 1}, .slots = {0, 0}, .my_place = context.rank()};
  const std::array<std::uint64_t, 4> split{3, next_id, 0, 0};
  one_sided::Entry entry{};
  std::memcpy(entry.data(), split.data(), sizeof(split));
  context.expect_ok((*backend)->exchange(world, entry).status(), "exchange");
  context.expect_ok((*backend)->leave(world), "leave");
}

TEST(OneSidedFabric, ARankThatNamesATeamThatThereCannotBeIsRefused) {
  constexpr std::size_t kHeapBytes = 4096;
  for (const std::uint64_t next_id :
       {~std::uint64_t{0}, std::uint64_t{1} << 31, std::uint64_t{1} << 32, std::uint64_t{65}}) {
    run_ranks({.num_ranks = 2}, [next_id](RankContext& context) {
      if (context.rank() == 1) {
        split_with_forged_entry(context, kHeapBytes, next_id);
        return;
      }
      OneSidedOptions options;
      options.backend = "cpu";
      options.ranks_per_node = context.num_ranks();
      options.heap_bytes = kHeapBytes;
      options.timeout_ns = 60 * kNsPerSecond;
      Result<std::shared_ptr<OneSided>> shm = OneSided::create(context.bootstrap(), options);
      if (!context.expect_ok(shm.status(), "create")) return;
      const Result<Team> team = (*shm)->split((*shm)->world(), 0, 0);
      context.expect_code(team.status(), ErrorCode::kTransport, "a split with it");
      context.expect(team.status().message().find(std::to_string(next_id)) != std::string_view::npos,
                     "the message has the forged id");
      context.expect(team.status().peer() == 1, "names the rank");
      context.expect_ok((*shm)->destroy(), "destroy");
    });
  }
}

}  // namespace
}  // namespace ferry::test
