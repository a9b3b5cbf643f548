/// Waits that expire or are stopped: they end in bounded time and are reported once, in the right words, and other work
/// of the process is not affected.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>

#include "gpu/litmus_host.hpp"

namespace ferry::test {
namespace {

using cuda::Awaited;
using cuda::DeviceReport;

constexpr int kNumRanks = 4;
constexpr std::chrono::milliseconds kTimeout{100};
constexpr std::uint64_t kTimeoutNs = std::chrono::nanoseconds(kTimeout).count();
/// Limit for a wait that should return at once.
constexpr std::uint64_t kAtOnceNs = kTimeoutNs / 10;
/// Deadline of `Awaited::kOwn`, in timeouts (sync/rank_sync.cuh, kOwnDeadlines).
constexpr std::uint64_t kOwnDeadlines = 4;
/// Progress words hold the lower half of an epoch.
constexpr std::uint64_t kWrap = std::uint64_t{1} << 32;

std::uint64_t word_of(std::uint64_t epoch, std::uint64_t num_rows) { return epoch << 32 | num_rows; }

class LitmusWait : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_GE(num_litmus_gpus(), 1) << "needs a GPU";
    ranks_ = std::make_unique<LitmusRanks>(std::vector<int>(kNumRanks, 0), kTimeout);
    stream_ = std::make_unique<GpuStream>(0);
  }

  std::vector<WaitOutcome> wait(const std::vector<PlannedWait>& waits) const { return wait(*ranks_, waits); }

  /// `meanwhile` runs after the waits have been launched.
  std::vector<WaitOutcome> wait(
      const LitmusRanks& ranks, const std::vector<PlannedWait>& waits,
      const std::function<void()>& meanwhile = [] {}) const {
    const GpuArray<PlannedWait> planned(0, waits);
    const GpuArray<WaitOutcome> outcomes(0, 2 * waits.size());
    const auto num_waits = static_cast<int>(waits.size());
    check_cuda(launch_waits(ranks.params(0), planned.data(), num_waits, outcomes.data(), stream_->enter()), "waits");
    meanwhile();
    finish({stream_.get()});
    return outcomes.read();
  }

  using LaunchWarp = cudaError_t (*)(const cuda::RankParams&, std::uint64_t, WaitOutcome*, cudaStream_t);
  std::vector<WaitOutcome> run_warp(const LitmusRanks& ranks, LaunchWarp launch, std::uint64_t epoch) const {
    const GpuArray<WaitOutcome> outcomes(0, 32);
    check_cuda(launch(ranks.params(0), epoch, outcomes.data(), stream_->enter()), "a warp that waits for all");
    finish({stream_.get()});
    return outcomes.read();
  }
  std::vector<WaitOutcome> wait_all(std::uint64_t epoch) const { return run_warp(*ranks_, launch_wait_all, epoch); }
  std::vector<WaitOutcome> finish_call(std::uint64_t epoch) const {
    return run_warp(*ranks_, launch_finish_call, epoch);
  }

  static void request_stop(const LitmusRanks& ranks) {
    __atomic_store_n(&ranks.report(0).stop.requested, 1, __ATOMIC_RELEASE);
  }

  static void expect_expired(const WaitOutcome& outcome, std::uint64_t timeout_ns) {
    EXPECT_EQ(outcome.held, 0U);
    EXPECT_GE(outcome.elapsed_ns, timeout_ns);
    EXPECT_LE(outcome.elapsed_ns, 2 * timeout_ns);
  }

  static void expect_ended_at_once(const WaitOutcome& outcome) {
    EXPECT_EQ(outcome.held, 0U);
    EXPECT_LE(outcome.elapsed_ns, kAtOnceNs);
  }

  void expect_lost(const PlannedWait& wait, std::uint64_t seen) const {
    const cuda::LostReport& lost = ranks_->report(0).lost;
    EXPECT_EQ(lost.state, 1U);
    EXPECT_EQ(lost.awaited, static_cast<std::int32_t>(wait.awaited));
    EXPECT_EQ(lost.peer, wait.peer);
    EXPECT_EQ(lost.epoch, wait.epoch);
    EXPECT_EQ(lost.seen, seen);
    EXPECT_EQ(lost.expected, wait.expected);
    EXPECT_EQ(ranks_->report(0).fault.state, 0U);
    EXPECT_EQ(ranks_->local(0).broken, 1U);
  }

  void expect_nothing_told() const {
    EXPECT_EQ(ranks_->report(0).lost.state, 0U);
    EXPECT_EQ(ranks_->local(0).broken, 0U);
  }

  /// Another rank on the same GPU can still wait for a flag that is set.
  static void expect_others_go_on() {
    const LitmusRanks others(std::vector<int>(kNumRanks, 0), kTimeout);
    others.set_progress(0, 1, word_of(9, 3));
    const GpuStream stream(0);
    const GpuArray<PlannedWait> planned(0, {{.peer = 1, .epoch = 9, .expected = 3}});
    const GpuArray<WaitOutcome> outcomes(0, 2);
    check_cuda(launch_waits(others.params(0), planned.data(), 1, outcomes.data(), stream.enter()), "later waits");
    finish({&stream});
    for (const WaitOutcome& outcome : outcomes.read()) EXPECT_EQ(outcome.held, 1U);
    EXPECT_EQ(others.report(0).lost.state, 0U);
    EXPECT_EQ(others.local(0).broken, 0U);
  }

  std::unique_ptr<LitmusRanks> ranks_;
  std::unique_ptr<GpuStream> stream_;
};

TEST_F(LitmusWait, AFlagThatIsThereIsNotWaitedFor) {
  ranks_->set_progress(0, 2, word_of(7, 4));
  for (const WaitOutcome& outcome : wait({{.awaited = Awaited::kRows, .peer = 2, .epoch = 7, .expected = 4}})) {
    EXPECT_EQ(outcome.held, 1U);
    EXPECT_LE(outcome.elapsed_ns, kAtOnceNs);
  }
  expect_nothing_told();
}

/// Time counts once, however many threads wait.
TEST_F(LitmusWait, RowsThatAreLateAreCountedOnce) {
  constexpr int kNumWaits = 64;
  constexpr int kLate = 2;
  const PlannedWait planned = {.awaited = Awaited::kRows, .peer = kLate, .epoch = 7, .expected = 4};
  const std::vector<PlannedWait> own = {{.awaited = Awaited::kRows, .peer = 0, .epoch = 7, .expected = 0}};
  std::vector<PlannedWait> waits(kNumWaits, planned);
  waits.insert(waits.end(), own.begin(), own.end());
  std::uint64_t longest_ns = 0;
  const auto come = [&] {
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - start < kTimeout / 2) {
    }
    ranks_->set_progress(0, kLate, word_of(7, 4));
  };
  for (const WaitOutcome& outcome : wait(*ranks_, waits, come)) {
    EXPECT_EQ(outcome.held, 1U);
    longest_ns = std::max(longest_ns, outcome.elapsed_ns);
  }
  const cuda::WaitTimes& counted = ranks_->report(0).waits;
  EXPECT_GE(counted.steps_ns[kLate], kTimeoutNs / 4);
  // Waits do not begin at exactly the same time.
  EXPECT_LE(counted.steps_ns[kLate], longest_ns + kAtOnceNs);
  for (const int other : {0, 1, 3}) EXPECT_EQ(counted.steps_ns[other], 0U) << other;
  expect_nothing_told();
}

TEST_F(LitmusWait, AnExpiredWaitTellsWhomItWaitedForAndBreaksTheGroup) {
  const PlannedWait planned = {.awaited = Awaited::kRows, .peer = 3, .epoch = 7, .expected = 5};
  const std::uint64_t seen = 4;
  ranks_->set_progress(0, 3, word_of(7, seen));
  const std::vector<WaitOutcome> outcomes = wait({planned});
  expect_expired(outcomes[0], kTimeoutNs);
  expect_ended_at_once(outcomes[1]);
  expect_lost(planned, seen);
  expect_others_go_on();
}

TEST_F(LitmusWait, OnceBrokenEveryOtherWaitEndsAtOnceAndTellsNothing) {
  (void)wait({{.awaited = Awaited::kEntry, .peer = 1, .epoch = 3, .expected = 3}});
  const DeviceReport told = ranks_->report(0);
  const std::vector<PlannedWait> later = {{.awaited = Awaited::kDone, .peer = 2, .epoch = 4, .expected = 4},
                                          {.awaited = Awaited::kCounts, .peer = 3, .epoch = 5, .expected = 5},
                                          {.awaited = Awaited::kOwn, .peer = 0, .epoch = 6, .expected = 6}};
  for (const WaitOutcome& outcome : wait(later)) expect_ended_at_once(outcome);
  EXPECT_EQ(std::memcmp(&told, &ranks_->report(0), sizeof(told)), 0) << "the report was written again";
  expect_others_go_on();
}

TEST_F(LitmusWait, OfManyWaitsThatExpireTogetherOneIsTold) {
  constexpr int kNumWaits = 64;
  std::vector<PlannedWait> waits;
  for (int i = 0; i < kNumWaits; ++i) {
    const auto epoch = static_cast<std::uint64_t>(100 + i);
    waits.push_back({static_cast<Awaited>(i % 4), i / 4 % kNumRanks, epoch, 1000 + epoch});
  }
  const std::vector<WaitOutcome> outcomes = wait(waits);
  for (std::size_t i = 0; i < waits.size(); ++i) {
    EXPECT_EQ(outcomes[2 * i].held, 0U);
    EXPECT_LE(outcomes[2 * i].elapsed_ns, 2 * kTimeoutNs);
    expect_ended_at_once(outcomes[2 * i + 1]);
  }
  const std::uint64_t told = ranks_->report(0).lost.epoch;
  ASSERT_GE(told, 100U);
  ASSERT_LT(told, 100U + kNumWaits);
  expect_lost(waits[static_cast<std::size_t>(told - 100)], 0);
  expect_others_go_on();
}

TEST_F(LitmusWait, WaitsForThisRanksOwnBlocksLeaveThemTimeToTell) {
  const PlannedWait planned = {.awaited = Awaited::kOwn, .peer = 0, .epoch = 2, .expected = 2};
  expect_expired(wait({planned})[0], kOwnDeadlines * kTimeoutNs);
  expect_lost(planned, 0);
}

TEST_F(LitmusWait, OneMissingRankOfAllIsNamed) {
  constexpr std::uint64_t kEpoch = 11;
  for (int rank = 0; rank < kNumRanks; ++rank) ranks_->set_done(0, rank, rank == 2 ? kEpoch - 1 : kEpoch);
  for (const WaitOutcome& outcome : wait_all(kEpoch)) {
    EXPECT_EQ(outcome.held, 0U) << "every lane gets the same answer";
    EXPECT_LE(outcome.elapsed_ns, 2 * kTimeoutNs);
  }
  expect_lost({Awaited::kDone, 2, kEpoch, kEpoch}, kEpoch - 1);
  expect_others_go_on();
}

TEST_F(LitmusWait, OfMoreRanksThanLanesTheLastIsNamed) {
  constexpr std::uint64_t kEpoch = 11;
  constexpr int kManyRanks = 33;
  const LitmusRanks many(std::vector<int>(kManyRanks, 0), kTimeout);
  for (int rank = 0; rank + 1 < kManyRanks; ++rank) many.set_done(0, rank, kEpoch);
  for (const WaitOutcome& outcome : run_warp(many, launch_wait_all, kEpoch)) EXPECT_EQ(outcome.held, 0U);
  EXPECT_EQ(many.report(0).lost.peer, kManyRanks - 1);

  const LitmusRanks all(std::vector<int>(kManyRanks, 0), kTimeout);
  for (int rank = 0; rank < kManyRanks; ++rank) all.set_done(0, rank, kEpoch);
  for (const WaitOutcome& outcome : run_warp(all, launch_wait_all, kEpoch)) EXPECT_EQ(outcome.held, 1U);
}

TEST_F(LitmusWait, AStopEndsWaitsLongBeforeTheirDeadline) {
  constexpr std::chrono::seconds kFarDeadline{50};  // less than `finish` allows
  constexpr std::uint64_t kSoonNs = 1'000'000'000;
  const LitmusRanks patient(std::vector<int>(kNumRanks, 0), kFarDeadline);
  constexpr int kNumWaits = 64;
  std::vector<PlannedWait> waits;
  for (int i = 0; i < kNumWaits; ++i) waits.push_back({static_cast<Awaited>(i % 4), i / 4 % kNumRanks, 100, 200});
  const auto outcomes = wait(patient, waits, [&patient] { request_stop(patient); });
  for (std::size_t i = 0; i < waits.size(); ++i) {
    EXPECT_EQ(outcomes[2 * i].held, 0U);
    EXPECT_LE(outcomes[2 * i].elapsed_ns, kSoonNs);
    expect_ended_at_once(outcomes[2 * i + 1]);
  }
  EXPECT_EQ(patient.report(0).lost.state, 1U);
  EXPECT_EQ(patient.report(0).lost.stopped, 1U);
  EXPECT_EQ(patient.local(0).broken, 1U);
  expect_others_go_on();
}

TEST_F(LitmusWait, AStopEndsNoWaitForWhatIsThere) {
  request_stop(*ranks_);
  ranks_->set_progress(0, 2, word_of(7, 7));
  for (const WaitOutcome& outcome : wait({{.awaited = Awaited::kRows, .peer = 2, .epoch = 7, .expected = 7}})) {
    EXPECT_EQ(outcome.held, 1U);
  }
  expect_nothing_told();
}

TEST_F(LitmusWait, AStopLeavesWaitsForOwnBlocksToTheirDeadline) {
  request_stop(*ranks_);
  const PlannedWait planned = {.awaited = Awaited::kOwn, .peer = 0, .epoch = 2, .expected = 2};
  expect_expired(wait({planned})[0], kOwnDeadlines * kTimeoutNs);
  expect_lost(planned, 0);
  EXPECT_EQ(ranks_->report(0).lost.stopped, 0U);
}

TEST_F(LitmusWait, AllRanksThere) {
  constexpr std::uint64_t kEpoch = 11;
  for (int rank = 0; rank < kNumRanks; ++rank) ranks_->set_done(0, rank, kEpoch);
  for (const WaitOutcome& outcome : wait_all(kEpoch)) EXPECT_EQ(outcome.held, 1U);
  expect_nothing_told();
}

/// A receiving warp that has given up takes no more rows, because no thread would wait for the loads that it starts.
TEST_F(LitmusWait, AWarpWhoseSourceIsLostGetsNoRowsOfOthers) {
  constexpr std::uint64_t kEpoch = 5;
  constexpr int kNumCalls = 6;
  const GpuArray<std::int32_t> source_base(0, {0, 0, 2, 4, 6});
  for (const bool lost : {false, true}) {
    SetUp();
    for (int source = 1; source < kNumRanks; ++source) {
      if (!lost || source != 2) ranks_->set_progress(0, source, word_of(kEpoch, 2));
    }
    const GpuArray<std::int32_t> rows(0, kNumCalls);
    check_cuda(launch_arrivals(ranks_->params(0), kEpoch, source_base.data(), kNumCalls, rows.data(), stream_->enter()),
               "arrivals");
    finish({stream_.get()});
    const std::vector<std::int32_t> all = {0, 2, 4, 1, 3, 5};
    EXPECT_EQ(rows.read(), lost ? (std::vector<std::int32_t>{0, -1, -1, -1, -1, -1}) : all);
  }
}

/// Words of other epochs count no rows, even if they are larger as numbers.
TEST_F(LitmusWait, RowsOfTheEpochsBeforeTheWrapAreNotThoseBehindIt) {
  ranks_->set_progress(0, 1, word_of(kWrap - 1, 100));
  const PlannedWait planned = {.awaited = Awaited::kRows, .peer = 1, .epoch = kWrap, .expected = 1};
  expect_expired(wait({planned})[0], kTimeoutNs);
  expect_lost(planned, 0);
}

TEST_F(LitmusWait, RowsBehindTheWrapAreThere) {
  ranks_->set_progress(0, 1, word_of(kWrap, 100));
  ranks_->set_progress(0, 2, word_of(kWrap + 1, 1));
  for (const WaitOutcome& outcome :
       wait({{.peer = 1, .epoch = kWrap, .expected = 100}, {.peer = 2, .epoch = kWrap + 1, .expected = 1}})) {
    EXPECT_EQ(outcome.held, 1U);
  }
  expect_nothing_told();
}

/// Otherwise an epoch would count the rows of the epoch 2^32 before it.
TEST_F(LitmusWait, TheEpochAtTheWrapLeavesNoRowsBehind) {
  for (const std::uint64_t epoch : {kWrap - 1, kWrap, kWrap + 1}) {
    for (int rank = 0; rank < kNumRanks; ++rank) {
      ranks_->set_progress(0, rank, word_of(epoch - 1, 3));
      ranks_->set_done(0, rank, epoch);
    }
    for (const WaitOutcome& outcome : finish_call(epoch)) EXPECT_EQ(outcome.held, 1U);
    EXPECT_EQ(ranks_->local(0).epoch, epoch);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      EXPECT_EQ(ranks_->progress(0, rank), epoch == kWrap ? 0 : word_of(epoch - 1, 3));
    }
  }
}

}  // namespace
}  // namespace ferry::test
