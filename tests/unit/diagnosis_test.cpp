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
