/// Calls in a row on streams without waits in between: no call may leave state behind that breaks the next one, with
/// any rank late.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "gpu/gpu_group.hpp"

namespace ferry::test {
namespace {

constexpr int kNumCases = 12;
constexpr int kRoundsBetweenLooks = 50;

/// One dispatch and one combine each. `all_bounded`: route never waits for the counts.
std::vector<PreparedCase> random_cases(int num_ranks, std::uint64_t seed, bool all_bounded) {
  std::mt19937_64 random(seed);
  std::vector<PreparedCase> cases;
  for (int i = 0; i < kNumCases; ++i) {
    ExchangeCase one = draw_case(random, num_ranks);
    one.world.spare_recv_rows = all_bounded || i % 3 != 0 ? i % 5 : -1;
    // 0 rows would mean: not bounded.
    if (one.world.spare_recv_rows == 0) one.world.spare_recv_rows = 1;
    one.dispatches.resize(1);
    one.combines.resize(1);
    cases.push_back(prepare(one));
  }
  return cases;
}

class Rounds {
 public:
  Rounds(RankContext& context, Group& group, const std::vector<PreparedCase>& cases) : cases_(cases) {
    for (const PreparedCase& one : cases) rounds_.push_back(std::make_unique<Round>(context, group, one));
  }

  Round& at(int round) { return *rounds_[static_cast<std::size_t>(round) % rounds_.size()]; }

  /// Checks the outputs and resets them. Call only after the streams were waited for.
  void look(RankContext& context) {
    for (std::size_t i = 0; i < rounds_.size(); ++i) {
      rounds_[i]->expect_received(context);
      rounds_[i]->refill(context, cases_[i]);
    }
  }

 private:
  const std::vector<PreparedCase>& cases_;
  std::vector<std::unique_ptr<Round>> rounds_;
};

void run_back_to_back(RankKind kind, int num_ranks, int num_rounds) {
  const std::vector<PreparedCase> cases = random_cases(num_ranks, 31, false);
  run_gpu_group(kind, num_ranks, [&](RankContext& context, Group& group) {
    Rounds rounds(context, group, cases);
    std::mt19937_64 random(77);  // the same on every rank
    meet(context);
    for (int round = 0; round < num_rounds; ++round) {
      const int late_rank = static_cast<int>(random() % static_cast<unsigned>(num_ranks));
      const int late_by = static_cast<int>(random() % 300);
      const auto before = static_cast<int>(random() % 4);
      RoundDelays delays;
      if (late_rank == context.rank()) {
        if (before == 0) delays.before_route = late_by;
        if (before == 1) delays.before_dispatch = late_by;
        if (before == 2) delays.before_combine = late_by;
      }
      if (!rounds.at(round).start(context, group, stream_of(group), delays)) return;
      if (round % kRoundsBetweenLooks != kRoundsBetweenLooks - 1) continue;
      if (!context.expect_ok(group.wait(stream_of(group)), fmt::format("wait after round {}", round))) return;
      rounds.look(context);
      if (!context.failures().empty()) context.fail(fmt::format("failed after round {}", round));
    }
  });
}

TEST(ManyCalls, BackToBackOnFourThreads) { run_back_to_back(RankKind::kThreads, 4, 1000); }
TEST(ManyCalls, BackToBackOnThreeThreads) { run_back_to_back(RankKind::kThreads, 3, 200); }
TEST(ManyCalls, BackToBackOnTwoProcesses) { run_back_to_back(RankKind::kProcesses, 2, 100); }

/// Two groups of the same ranks on two streams. Ranks start the groups in different orders, so that kernels of both
/// wait for their peers at the same time. Each uses few multiprocessors, so that all kernels fit a shared GPU.
void run_two_groups(RankKind kind, int num_ranks, int num_rounds) {
  const std::vector<PreparedCase> first_cases = random_cases(num_ranks, 41, true);
  const std::vector<PreparedCase> second_cases = random_cases(num_ranks, 42, true);
  run_gpu_group(kind, num_ranks, [&](RankContext& context, Group& first) {
    auto second = Group::create(context.bootstrap(), gpu_group_options());
    if (!context.expect_ok(second.status(), "second group")) return;
    const RankStream streams[2] = {RankStream(context), RankStream(context)};
    Group* const groups[2] = {&first, second->get()};
    Rounds rounds[2] = {{context, first, first_cases}, {context, **second, second_cases}};
    meet(context);
    for (int round = 0; round < num_rounds; ++round) {
      for (int turn = 0; turn < 2; ++turn) {
        const int which = (turn + round / 3 + context.rank()) % 2;
        Round& one = rounds[which].at(round);
        one.kernel.num_sms = 4;
        if (!one.start(context, *groups[which], streams[which].get())) return;
      }
      if (round % 20 != 19) continue;
      for (int which = 0; which < 2; ++which) {
        const Status status = groups[which]->wait(streams[which].get());
        if (!context.expect_ok(status, fmt::format("group {}, round {}", which, round))) return;
        rounds[which].look(context);
      }
      meet(context);
    }
    context.expect_ok((*second)->destroy(), "destroy the second group");
  });
}

TEST(TwoGroups, InterleavedOnTwoThreads) { run_two_groups(RankKind::kThreads, 2, 100); }
TEST(TwoGroups, InterleavedOnFourThreads) { run_two_groups(RankKind::kThreads, 4, 100); }
TEST(TwoGroups, InterleavedOnTwoProcesses) { run_two_groups(RankKind::kProcesses, 2, 40); }

}  // namespace
}  // namespace ferry::test
