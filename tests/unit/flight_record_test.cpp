/// A rank's record of its calls: what readers see while it is written, and from a process that has ended.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/flight_recorder.hpp"
#include "core/flight_snapshot.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

constexpr RecordOwner kOwner{.group_id = 7, .rank = 2, .num_ranks = 4, .ranks_per_node = 4, .timeout_ns = kNsPerSecond};

TEST(FlightRecord, ShowsTheLastCallsWithTheirArguments) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  recorder.open(kOwner);
  recorder.begin(RecordedOperation::kRoute);
  recorder.describe({.num_tokens = 64, .num_topk = 8});
  recorder.end({}, CallPhase::kReturned);
  recorder.begin(RecordedOperation::kDispatch);
  recorder.describe({.num_tokens = 64, .row_bytes = 7168, .dtype = DType::kFloat8E4M3});
  recorder.reach(CallPhase::kEntered);

  const RecordedRank seen = take_snapshot(*record);
  EXPECT_EQ(seen.rank, 2);
  EXPECT_EQ(seen.pid, getpid());
  EXPECT_EQ(seen.process, ProcessState::kRunning);
  ASSERT_EQ(seen.calls.size(), 2U);
  EXPECT_EQ(seen.calls[0].operation, "route");
  EXPECT_EQ(seen.calls[0].number, 1);
  EXPECT_EQ(seen.calls[0].phase, CallPhase::kReturned);
  EXPECT_EQ(seen.calls[0].num_topk, 8);
  EXPECT_GE(seen.calls[0].ended_ns, seen.calls[0].called_ns);
  EXPECT_EQ(seen.calls[1].operation, "dispatch");
  EXPECT_EQ(seen.calls[1].number, 2);
  EXPECT_EQ(seen.calls[1].phase, CallPhase::kEntered);
  EXPECT_EQ(seen.calls[1].num_tokens, 64);
  EXPECT_EQ(seen.calls[1].row_bytes, 7168);
  EXPECT_EQ(seen.calls[1].dtype, DType::kFloat8E4M3);
  EXPECT_EQ(seen.calls[1].ended_ns, 0);
  EXPECT_TRUE(seen.waits.empty());
}

TEST(FlightRecord, KeepsAsManyCallsAsItSays) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  recorder.open(kOwner);
  constexpr auto kMade = static_cast<std::int64_t>(2 * kNumRecordedCalls + 5);
  for (std::int64_t i = 0; i < kMade; ++i) {
    recorder.begin(RecordedOperation::kCombine);
    recorder.end({}, CallPhase::kReturned);
  }
  const RecordedRank seen = take_snapshot(*record);
  ASSERT_EQ(seen.calls.size(), kNumRecordedCalls);
  EXPECT_EQ(seen.calls.front().number, kMade - static_cast<std::int64_t>(kNumRecordedCalls) + 1);
  EXPECT_EQ(seen.calls.back().number, kMade);
  EXPECT_EQ(take_snapshot(*record, 3).calls.size(), 3U);
}

TEST(FlightRecord, NumbersOnlyTheCallsOfAllRanks) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  for (const auto operation : {RecordedOperation::kLatencyDispatch, RecordedOperation::kLatencyReceive,
                               RecordedOperation::kLatencyCombine, RecordedOperation::kWait}) {
    recorder.begin(operation);
    recorder.end({}, CallPhase::kLaunched);
  }
  std::vector<std::int64_t> numbers;
  for (const RecordedCall& call : take_snapshot(*record).calls) numbers.push_back(call.number);
  EXPECT_EQ(numbers, (std::vector<std::int64_t>{1, 1, 2, 2}));
}

TEST(FlightRecord, ShowsTheErrorOfACall) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  recorder.begin(RecordedOperation::kDispatch);
  recorder.end(Status(ErrorCode::kTimeout, "late", 3), CallPhase::kReturned);
  const RecordedCall call = take_snapshot(*record).calls.at(0);
  EXPECT_EQ(call.phase, CallPhase::kFailed);
  EXPECT_EQ(call.code, ErrorCode::kTimeout);
  EXPECT_EQ(call.peer, 3);
}

TEST(FlightRecord, ShowsWaitsUntilTheyEnd) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  recorder.begin(RecordedOperation::kDispatch);
  const std::vector<int> missing{0, 1, 3, 4, 5, 6, 7, 8, 9, 10};
  recorder.show_wait(kHostWait, missing, "to stage its rows", kNsPerSecond);
  recorder.show_wait(kGpuWait, std::vector{3}, "to send its rows", 2 * kNsPerSecond);
  RecordedRank seen = take_snapshot(*record);
  ASSERT_EQ(seen.waits.size(), 2U);
  EXPECT_EQ(seen.waits[0].num_missing, 10);
  EXPECT_EQ(seen.waits[0].ranks, (std::vector{0, 1, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(seen.waits[0].reason, "to stage its rows");
  EXPECT_FALSE(seen.waits[0].on_gpu);
  EXPECT_TRUE(seen.waits[1].on_gpu);
  const std::string text = seen.describe(6 * kNsPerSecond);
  EXPECT_NE(text.find("has waited for ranks 0, 1, 3, 4, 5, 6, 7, 8, … (10 in all) to stage its rows for 5.0 s"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("its GPU has waited for rank 3 to send its rows for 4.0 s"), std::string::npos) << text;
  recorder.end_wait(kHostWait);
  seen = take_snapshot(*record);
  ASSERT_EQ(seen.waits.size(), 1U);
  EXPECT_TRUE(seen.waits[0].on_gpu);
}

/// A reader never sees a mixture of two calls.
TEST(FlightRecord, IsReadWhileItIsWritten) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  recorder.open(kOwner);
  std::atomic<bool> ends{false};
  std::thread writer([&] {
    for (std::int64_t i = 1; !ends.load(std::memory_order_relaxed); ++i) {
      recorder.begin(RecordedOperation::kDispatch);
      recorder.describe({.num_tokens = i, .row_bytes = 16 * (i % 1000)});
      recorder.show_wait(kHostWait, std::vector(static_cast<std::size_t>(i % 8 + 1), static_cast<int>(i % 8)),
                         "to finish its part", i);
      recorder.end({}, CallPhase::kReturned);
    }
  });
  std::size_t num_seen = 0;
  while (num_seen < 1'000'000) {
    const RecordedRank seen = take_snapshot(*record);
    for (const RecordedCall& call : seen.calls) {
      if (call.num_tokens == -1) continue;  // not described yet
      ++num_seen;
      EXPECT_EQ(call.num_tokens, call.number);
      if (call.phase == CallPhase::kReturned) {
        EXPECT_EQ(call.row_bytes, 16 * (call.number % 1000));
      }
    }
    for (const RecordedWait& wait : seen.waits) {
      EXPECT_EQ(wait.num_missing, wait.since_ns % 8 + 1);
      for (const int rank : wait.ranks) EXPECT_EQ(rank, wait.since_ns % 8);
    }
  }
  ends = true;
  writer.join();
}

TEST(FlightRecord, OfAnEndedProcessSaysSo) {
  const auto record = std::make_unique<FlightRecord>();
  FlightRecorder recorder(*record);
  recorder.open(kOwner);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(0);
  record->pid = child;
  int exit_status = 0;
  ASSERT_EQ(waitpid(child, &exit_status, 0), child);
  EXPECT_EQ(take_snapshot(*record).process, ProcessState::kEnded);
  record->pid = getpid();
  record->start_time_ticks += 1;  // another process had this number before
  EXPECT_EQ(take_snapshot(*record).process, ProcessState::kEnded);
  record->pid_namespace += 1;
  EXPECT_EQ(take_snapshot(*record).process, ProcessState::kUnknown);
}

}  // namespace
}  // namespace ferry
