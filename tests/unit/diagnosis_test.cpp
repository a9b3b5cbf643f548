/// The cause of a hung group, from made-up records of its ranks.

#include "core/diagnosis.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kNow = 100 * kNsPerSecond;

RecordedCall call(std::int64_t number, CallPhase phase, std::string_view operation = "dispatch") {
  RecordedCall made;
  made.operation = operation;
  made.number = number;
  made.phase = phase;
  made.called_ns = number * kNsPerSecond;
  if (phase >= CallPhase::kLaunched) made.ended_ns = made.called_ns + kNsPerSecond / 2;
  return made;
}

RecordedCall failed(std::int64_t number, ErrorCode code, int peer) {
  RecordedCall made = call(number, CallPhase::kFailed);
  made.code = code;
  made.peer = peer;
  return made;
}

RecordedWait wait_for(std::vector<int> ranks, std::string reason, bool on_gpu = false) {
  const auto num_missing = static_cast<int>(ranks.size());
  return {std::move(ranks), num_missing, std::move(reason), kNow - kNsPerSecond, on_gpu, 0};
}

RecordedRank running(int rank, std::vector<RecordedCall> calls, std::vector<RecordedWait> waits = {}) {
  return {rank, 1000 + rank, ProcessState::kRunning, false, std::move(calls), std::move(waits)};
}

RecordedGroup group_of(int num_ranks, int ranks_per_node, std::vector<RecordedRank> ranks) {
  RecordedGroup group;
  group.num_ranks = num_ranks;
  group.ranks_per_node = ranks_per_node;
  group.now_ns = kNow;
  group.ranks = std::move(ranks);
  return group;
}

void expect_cause(const RecordedGroup& group, DiagnosisKind kind, int rank, int peer = -1) {
  const Diagnosis seen = diagnose(group);
  EXPECT_EQ(to_string(seen.kind), to_string(kind)) << seen.text;
  EXPECT_EQ(seen.rank, rank) << seen.text;
  if (peer >= 0) {
    EXPECT_EQ(seen.peer, peer) << seen.text;
  }
}

constexpr const char* kEntry = "to make the same call";
constexpr const char* kDone = "to finish its part";

TEST(Diagnosis, NothingWaits) {
  expect_cause(group_of(2, 2, {running(0, {call(3, CallPhase::kReturned)}), running(1, {call(3, CallPhase::kMoving)})}),
               DiagnosisKind::kHealthy, -1);
}

TEST(Diagnosis, ARankThatHasNotCalledIsLate) {
  expect_cause(group_of(3, 3,
                        {running(0, {call(4, CallPhase::kEntered)}, {wait_for({1}, kEntry)}),
                         running(1, {call(3, CallPhase::kReturned)}),
                         running(2, {call(4, CallPhase::kEntered)}, {wait_for({1}, kEntry)})}),
               DiagnosisKind::kLate, 1);
}

TEST(Diagnosis, AChainEndsAtTheRankThatDoesNotWait) {
  // Rank 0 waits for 1, which is still in the call before, where it waits for 2.
  expect_cause(group_of(3, 3,
                        {running(0, {call(4, CallPhase::kEntered)}, {wait_for({1}, kEntry)}),
                         running(1, {call(3, CallPhase::kMoving)}, {wait_for({2}, kDone)}),
                         running(2, {call(3, CallPhase::kMoving)})}),
               DiagnosisKind::kInCall, 2);
}

TEST(Diagnosis, AStoppedRankIsNamedWhateverItWaitedFor) {
  RecordedRank stopped = running(1, {call(4, CallPhase::kEntered)}, {wait_for({0}, kEntry)});
  stopped.process = ProcessState::kStopped;
  expect_cause(group_of(2, 2, {running(0, {call(4, CallPhase::kMoving)}, {wait_for({1}, kDone)}), stopped}),
               DiagnosisKind::kStopped, 1);
}

TEST(Diagnosis, AnEndedRankIsNamedFromTheErrorsOfTheOthers) {
  RecordedRank ended = running(2, {call(4, CallPhase::kEntered)}, {wait_for({0}, kEntry)});
  ended.process = ProcessState::kEnded;
  expect_cause(group_of(3, 3,
                        {running(0, {failed(4, ErrorCode::kPeerLost, 2)}),
                         running(1, {failed(4, ErrorCode::kPeerLost, 2)}), ended}),
               DiagnosisKind::kEnded, 2);
}

TEST(Diagnosis, ARankThatEndedAfterAnErrorIsNotTheCause) {
  RecordedRank gave_up = running(0, {failed(4, ErrorCode::kTimeout, 1)});
  gave_up.process = ProcessState::kEnded;
  expect_cause(
      group_of(3, 3,
               {gave_up, running(1, {call(3, CallPhase::kReturned)}), running(2, {failed(4, ErrorCode::kTimeout, 1)})}),
      DiagnosisKind::kLate, 1);
}

TEST(Diagnosis, ARankThatCameAfterTheOthersGaveUpWasLate) {
  RecordedRank late = running(1, {failed(4, ErrorCode::kTimeout, 1)});
  late.calls[0].called_ns += kNsPerSecond;
  late.calls[0].ended_ns += kNsPerSecond;
  expect_cause(group_of(2, 2, {running(0, {failed(4, ErrorCode::kTimeout, 1)}), late}), DiagnosisKind::kLate, 1);
}

TEST(Diagnosis, ADifferentCallIsThatOfTheFewestRanks) {
  expect_cause(group_of(3, 3,
                        {running(0, {failed(4, ErrorCode::kInvalidArgument, 1)}),
                         running(1, {call(4, CallPhase::kFailed, "combine")}),
                         running(2, {failed(4, ErrorCode::kInvalidArgument, 1)})}),
               DiagnosisKind::kOtherCall, 1);
}

/// A wait that returned after call `number`.
RecordedCall waited(std::int64_t number, ErrorCode code = ErrorCode::kOk, int peer = -1) {
  RecordedCall made = call(number, code == ErrorCode::kOk ? CallPhase::kReturned : CallPhase::kFailed, "wait");
  made.code = code;
  made.peer = peer;
  return made;
}

/// Calls that a host has launched, the first under number `first`.
std::vector<RecordedCall> launched(std::int64_t first, const std::vector<std::string_view>& operations) {
  std::vector<RecordedCall> calls;
  for (const std::string_view operation : operations) {
    calls.push_back(call(first + std::ssize(calls), CallPhase::kLaunched, operation));
  }
  return calls;
}

std::vector<RecordedCall> operator+(std::vector<RecordedCall> calls, const RecordedCall& next) {
  calls.push_back(next);
  return calls;
}

/// Calls of three ranks of which the second has made another one under number 5, and the hosts went on.
std::vector<std::vector<RecordedCall>> differing() {
  return {launched(4, {"dispatch", "combine", "latency_dispatch"}),
          launched(4, {"dispatch", "dispatch", "latency_dispatch"}),
          launched(4, {"dispatch", "combine", "latency_dispatch"})};
}

RecordedGroup running_with(const std::vector<std::vector<RecordedCall>>& calls) {
  const auto num_ranks = static_cast<int>(std::ssize(calls));
  RecordedGroup group = group_of(num_ranks, num_ranks, {});
  for (int rank = 0; rank < num_ranks; ++rank)
    group.ranks.push_back(running(rank, calls[static_cast<std::size_t>(rank)]));
  return group;
}

TEST(Diagnosis, AnOlderCallThatDiffersIsFoundBehindLaterOnesThatAreAlike) {
  RecordedGroup group = running_with(differing());
  group.ranks[0].waits = {wait_for({1}, kEntry, true)};
  group.ranks[1].waits = {wait_for({0, 2}, kEntry, true)};
  expect_cause(group, DiagnosisKind::kOtherCall, 1, 0);
  EXPECT_EQ(diagnose(group).text, "rank 1 called dispatch as call 5, where ranks 0, 2 called combine");
  // The first one, whatever followed from it.
  group.ranks[2].calls.back().operation = "latency_combine";
  expect_cause(group, DiagnosisKind::kOtherCall, 1, 0);
}

TEST(Diagnosis, ACallThatDiffersExplainsTheErrorsOfAllRanks) {
  RecordedGroup group = running_with(differing());
  for (RecordedRank& rank : group.ranks) rank.calls.push_back(waited(6, ErrorCode::kInvalidArgument, 1));
  expect_cause(group, DiagnosisKind::kOtherCall, 1);
  // Destroying the group and ending is no way to go on.
  group.ranks[1].calls.push_back(call(7, CallPhase::kCalled, "destroy"));
  group.ranks[2].process = ProcessState::kEnded;
  expect_cause(group, DiagnosisKind::kOtherCall, 1);
}

TEST(Diagnosis, ACallThatDifferedIsNotBlamedOnceLaterCallsHaveSucceeded) {
  const std::vector<std::vector<RecordedCall>> made = differing();
  // Rank 2 is late for call 8, after a call that has succeeded on one rank.
  const auto late_after = [&](const RecordedCall& proof) {
    RecordedGroup group = running_with({made[0] + call(7, CallPhase::kLaunched) + proof + call(8, CallPhase::kLaunched),
                                        made[1] + call(7, CallPhase::kLaunched) + call(8, CallPhase::kLaunched),
                                        made[2] + call(7, CallPhase::kLaunched)});
    group.ranks[0].waits = {wait_for({2}, kEntry, true)};
    return group;
  };
  expect_cause(late_after(waited(7)), DiagnosisKind::kLate, 2);
  expect_cause(late_after(call(7, CallPhase::kReturned, "route")), DiagnosisKind::kLate, 2);
  // An earlier wait proves nothing about it, nor does one right behind the call, whose error may have been polled.
  expect_cause(late_after(waited(4)), DiagnosisKind::kOtherCall, 1);
  expect_cause(late_after(waited(5)), DiagnosisKind::kOtherCall, 1);
}

TEST(Diagnosis, ACallThatDifferedIsNotBlamedOnceARankGotTheErrorAndWentOn) {
  RecordedGroup group = running_with({{failed(4, ErrorCode::kInvalidArgument, 1), call(5, CallPhase::kEntered)},
                                      {call(4, CallPhase::kFailed, "combine"), call(5, CallPhase::kEntered)},
                                      {failed(4, ErrorCode::kInvalidArgument, 1)}});
  group.ranks[0].waits = {wait_for({2}, kEntry)};
  expect_cause(group, DiagnosisKind::kLate, 2);
  // A later difference counts again.
  group.ranks[2].calls.push_back(call(5, CallPhase::kEntered, "route"));
  expect_cause(group, DiagnosisKind::kOtherCall, 2);
}

TEST(Diagnosis, CallsOfABrokenGroupAreNotCompared) {
  RecordedRank ended = running(2, {call(3, CallPhase::kReturned)});
  ended.process = ProcessState::kEnded;
  expect_cause(group_of(3, 3,
                        {running(0, {failed(4, ErrorCode::kPeerLost, 2), call(5, CallPhase::kFailed, "destroy")}),
                         running(1, {failed(4, ErrorCode::kPeerLost, 2), failed(5, ErrorCode::kPeerLost, 2)}), ended}),
               DiagnosisKind::kEnded, 2);
}

TEST(Diagnosis, NumbersBehindARouteThatOneRankWasRefusedAreNotCompared) {
  // Rank 1 leaves out the dispatch and the combine of this route, as docs/errors.md asks.
  RecordedCall refused = call(4, CallPhase::kFailed, "route");
  refused.code = ErrorCode::kInvalidArgument;
  std::vector<RecordedCall> others = launched(4, {"route", "dispatch", "combine"}) + waited(6, refused.code, 1);
  for (const RecordedCall& next : launched(7, {"route", "dispatch", "combine", "route"})) others.push_back(next);
  std::vector<RecordedCall> own = {refused};
  for (const RecordedCall& next : launched(5, {"route", "dispatch", "combine"})) own.push_back(next);
  RecordedGroup group = running_with({others, own});
  group.ranks[0].waits = {wait_for({1}, kEntry, true)};
  expect_cause(group, DiagnosisKind::kLate, 1);
}

TEST(Diagnosis, CallsThatARecordNoLongerHoldsAreNotCompared) {
  RecordedGroup group = running_with(differing());
  group.ranks[1].calls.erase(group.ranks[1].calls.begin(), group.ranks[1].calls.begin() + 2);
  group.ranks[0].waits = {wait_for({1}, kEntry, true)};
  expect_cause(group, DiagnosisKind::kBusyGpu, 1);
}

TEST(Diagnosis, OfTwoRanksThatDifferTheOneIsOddThatDepartsFromItsPattern) {
  const std::vector<std::string_view> step = {"route", "dispatch", "combine", "dispatch", "combine"};
  for (const int odd : {0, 1}) {
    // Dispatch follows combine as well as route does, so one call before does not tell.
    std::vector<std::vector<RecordedCall>> calls(2);
    for (auto& made : calls) {
      made = launched(1, step) + waited(5);
      for (const RecordedCall& next : launched(6, step)) made.push_back(next);
    }
    calls[static_cast<std::size_t>(odd)][9].operation = "route";
    RecordedGroup group = running_with(calls);
    for (RecordedRank& rank : group.ranks) rank.waits = {wait_for({1 - rank.rank}, kEntry, true)};
    expect_cause(group, DiagnosisKind::kOtherCall, odd, 1 - odd);
  }
}

TEST(Diagnosis, OfTwoRanksWithoutAPatternTheSecondIsNamed) {
  expect_cause(running_with({launched(1, {"route", "combine"}), launched(1, {"route", "dispatch"})}),
               DiagnosisKind::kOtherCall, 1, 0);
}

TEST(Diagnosis, AGroupWithAFailedCallIsNotHealthy) {
  RecordedGroup group = running_with({{failed(4, ErrorCode::kCapacity, 0)}, {failed(4, ErrorCode::kCapacity, 0)}});
  group.ranks[0].calls[0].ended_ns += kNsPerSecond;
  expect_cause(group, DiagnosisKind::kUnclear, 0, 1);
  EXPECT_EQ(diagnose(group).text,
            "rank 1 got kCapacity from dispatch (call 4) 95.5 s ago, an error that names rank 0; no rank waits for "
            "another");
  // An error that names no rank is that of the rank that got it first.
  group.ranks[1].calls[0].peer = -1;
  expect_cause(group, DiagnosisKind::kUnclear, 1);
  // The program went on.
  for (RecordedRank& rank : group.ranks) rank.calls.push_back(call(5, CallPhase::kReturned));
  expect_cause(group, DiagnosisKind::kHealthy, -1);
}

TEST(Diagnosis, AnEntryThatHasNotArrivedIsTheNetworks) {
  // Both have entered the call, and rank 1 does not see that of rank 0.
  expect_cause(
      group_of(2, 1,
               {running(0, {call(4, CallPhase::kMoving)}, {wait_for({1}, "to collect the other nodes' calls")}),
                running(1, {call(4, CallPhase::kEntered)}, {wait_for({0}, kEntry)})}),
      DiagnosisKind::kSlowLink, 0, 1);
}

TEST(Diagnosis, OfTwoRanksThatMissEachOtherTheOneThatIsAheadHasSent) {
  RecordedWait behind = wait_for({1}, "to send its tables");
  behind.step = 4;
  RecordedWait ahead = wait_for({0}, "to send its tokens or make room for more");
  ahead.step = 6;
  expect_cause(group_of(2, 1,
                        {running(0, {call(4, CallPhase::kMoving)}, {behind}),
                         running(1, {call(4, CallPhase::kMoving)}, {ahead})}),
               DiagnosisKind::kSlowLink, 1, 0);
}

TEST(Diagnosis, RowsOfARankThatHasReturnedAreTheNetworks) {
  expect_cause(group_of(2, 1,
                        {running(0, {call(4, CallPhase::kReturned)}),
                         running(1, {call(4, CallPhase::kMoving)},
                                 {wait_for({0}, "to send its tokens or make room for more")})}),
               DiagnosisKind::kSlowLink, 0, 1);
}

TEST(Diagnosis, AGpuThatHasNotBegunIsBusy) {
  expect_cause(group_of(2, 2,
                        {running(0, {call(4, CallPhase::kLaunched)}, {wait_for({1}, kEntry, true)}),
                         running(1, {call(4, CallPhase::kLaunched)})}),
               DiagnosisKind::kBusyGpu, 1);
  // Its host waits for it, and so has not made the calls that the other has launched since.
  RecordedCall waits = call(4, CallPhase::kCalled, "wait");
  expect_cause(group_of(2, 2,
                        {running(0, {call(6, CallPhase::kLaunched)}, {wait_for({1}, "to send its rows", true)}),
                         running(1, {call(4, CallPhase::kLaunched), waits})}),
               DiagnosisKind::kBusyGpu, 1);
}

TEST(Diagnosis, ARankWhoseGpuHasNotBegunTheRouteThatItsHostWaitsForIsBusy) {
  RecordedCall launched_route = call(4, CallPhase::kLaunched, "route");
  launched_route.ended_ns = 0;
  RecordedGroup group = running_with({{launched_route}, {launched_route}});
  group.ranks[0].waits = {wait_for({1}, "to post its counts", true)};
  expect_cause(group, DiagnosisKind::kBusyGpu, 1, 0);
  const std::string text = diagnose(group).text;
  EXPECT_TRUE(
      text.starts_with("rank 1 launched route (call 4) and has been in it for 96.0 s; its GPU waits for no rank"))
      << text;
}

TEST(Diagnosis, ARankThatHasNotLaunchedIsLate) {
  expect_cause(group_of(2, 2,
                        {running(0, {call(4, CallPhase::kLaunched)}, {wait_for({1}, kEntry, true)}),
                         running(1, {call(3, CallPhase::kLaunched)})}),
               DiagnosisKind::kLate, 1);
}

TEST(Diagnosis, AMissingRankWithoutARecordIsOnAnotherHost) {
  expect_cause(group_of(2, 1, {running(0, {call(4, CallPhase::kEntered)}, {wait_for({1}, kEntry)})}),
               DiagnosisKind::kUnclear, 1);
}

}  // namespace
}  // namespace ferry
