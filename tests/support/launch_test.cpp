/// Tests of the library that starts ranks. Its use in tests is covered by rank_runner_test.cpp, its use in the command
/// by tests/tools/rank_processes_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <new>
#include <stdexcept>

#include "launch/child_process.hpp"
#include "launch/clock.hpp"
#include "launch/meeting_point.hpp"
#include "launch/ranks.hpp"
#include "launch/shared_area.hpp"
#include "launch/status_report.hpp"
#include "support/sanitizers.hpp"

namespace ferry::launch {
namespace {

using ::testing::HasSubstr;

TEST(MeetingPoint, SecretIsSixtyFourHexDigitsAndNeverTheSame) {
  const MeetingPoint first = MeetingPoint::open().value();
  const MeetingPoint second = MeetingPoint::open().value();
  EXPECT_EQ(first.secret.size(), 64U);
  EXPECT_EQ(first.secret.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(first.secret, second.secret);
  EXPECT_NE(first.port, second.port);
  first.close_listener();
  second.close_listener();
}

TEST(StatusReport, KeepsCodePeerAndMessage) {
  const Status status = decode_status(encode_status({ErrorCode::kCapacity, "dispatch: no room", 7}));
  EXPECT_EQ(status.code(), ErrorCode::kCapacity);
  EXPECT_EQ(status.peer(), 7);
  EXPECT_EQ(status.message(), "dispatch: no room");
  EXPECT_TRUE(decode_status(encode_status({})).ok());
  EXPECT_EQ(decode_status("cut").code(), ErrorCode::kInternal);
}

TEST(ChildProcess, ReportsPieceByPieceAndExits) {
  auto child = ChildProcess::start([](const ReportPipe& pipe) {
                 pipe.send("first");
                 raise(SIGSTOP);
                 pipe.send(" second");
                 return 3;
               }).value();
  EXPECT_TRUE(child.read_report());
  EXPECT_EQ(child.report(), "first");
  EXPECT_FALSE(child.poll_end());
  // Repeats the signal, as the child may not have stopped yet.
  while (!child.poll_end()) child.send_signal(SIGCONT);
  EXPECT_EQ(child.report(), "first second");
  EXPECT_EQ(child.wait().exit_code, 3);
}

TEST(ChildProcess, AnExceptionEndsItWithACodeOfItsOwn) {
  auto child = ChildProcess::start([](const ReportPipe&) -> int { throw std::runtime_error("on purpose"); }).value();
  EXPECT_EQ(child.wait().exit_code, ChildProcess::kExitException);
}

TEST(ChildProcess, DoesNotOutliveItsOwner) {
  pid_t pid = -1;
  {
    const auto child = ChildProcess::start([](const ReportPipe&) { return pause(); }).value();
    pid = child.pid();
    EXPECT_EQ(kill(pid, 0), 0);
  }
  EXPECT_EQ(kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
}

TEST(RankProcesses, LongReportsArriveInFull) {
  constexpr std::size_t kBytes = std::size_t{1} << 20;  // more than a pipe holds
  const auto ends = run_rank_processes({.num_ranks = 3}, [](int rank, const Result<std::shared_ptr<Bootstrap>>&) {
                      return std::string(kBytes, static_cast<char>('a' + rank));
                    }).value();
  ASSERT_EQ(ends.size(), 3U);
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_EQ(ends[rank].report, std::string(kBytes, static_cast<char>('a' + rank)));
    EXPECT_EQ(ends[rank].process.exit_code, 1);
  }
}

TEST(RankProcesses, ARunThatIsGivenUpStopsTheOthers) {
  RankProcesses run{.num_ranks = 3};
  run.patience_ns = [](int, const RankEnd& end) { return end.process.clean() ? kNoTimeout : 0; };
  const auto ends = run_rank_processes(run, [](int rank, const Result<std::shared_ptr<Bootstrap>>& bootstrap) {
                      if (!bootstrap.ok()) return bootstrap.status().to_string();
                      if (rank == 1) return std::string("failed");
                      while (rank == 2) pause();
                      return std::string();
                    }).value();
  EXPECT_EQ(ends[1].report, "failed");
  EXPECT_FALSE(ends[1].stopped);
  EXPECT_TRUE(ends[2].stopped);
  EXPECT_FALSE(ends[2].timed_out);
  EXPECT_EQ(ends[2].process.signal, SIGKILL);
}

TEST(RankProcesses, ASignalMaskIsAsBefore) {
  sigset_t before;
  sigprocmask(SIG_SETMASK, nullptr, &before);
  const auto ends = run_rank_processes({.num_ranks = 1}, [&](int, const Result<std::shared_ptr<Bootstrap>>&) {
                      sigset_t inside;
                      sigprocmask(SIG_SETMASK, nullptr, &inside);
                      return std::string(sigismember(&inside, SIGTERM) == 0 ? "" : "SIGTERM is blocked in the rank");
                    }).value();
  EXPECT_EQ(ends[0].report, "");
  sigset_t after;
  sigprocmask(SIG_SETMASK, nullptr, &after);
  for (int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal)) << signal;
  }
}

TEST(SharedBarrier, LetsAllPassTogetherAndKnowsWhen) {
  constexpr int kNumRanks = 3;
  const SharedArea area = SharedArea::map(sizeof(SharedBarrier)).value();
  auto* barrier = new (area.bytes().data()) SharedBarrier();
  const std::int64_t begin_ns = now_ns();
  const auto ends = run_rank_processes({.num_ranks = kNumRanks}, [&](int, const Result<std::shared_ptr<Bootstrap>>&) {
                      for (int repeat = 0; repeat < 100; ++repeat) {
                        const Status status = barrier->wait(kNumRanks, 30 * kNsPerSecond);
                        if (!status.ok()) return status.to_string();
                      }
                      return std::string();
                    }).value();
  for (const RankEnd& end : ends) EXPECT_EQ(end.report, "");
  EXPECT_GT(barrier->released_ns(), begin_ns);
  EXPECT_LT(barrier->released_ns(), now_ns());
}

TEST(SharedBarrier, TimesOutAndCountsThoseWhoCame) {
  const SharedArea area = SharedArea::map(sizeof(SharedBarrier)).value();
  auto* barrier = new (area.bytes().data()) SharedBarrier();
  const Status status = barrier->wait(2, 1'000'000);
  EXPECT_EQ(status.code(), ErrorCode::kTimeout);
  EXPECT_THAT(std::string(status.message()), HasSubstr("1 of 2 ranks"));
}

/// Stacks of threads take address space, of which the child has a little more than it uses.
TEST(RankThreads, ThatCannotAllBeStartedAreAnErrorAndNotTheEndOfTheProcess) {
  if (test::kSanitized) GTEST_SKIP() << "sanitizers reserve address space of their own";
  ChildProcess child = ChildProcess::start([](const ReportPipe& pipe) {
                         std::ifstream usage("/proc/self/statm");
                         rlim_t num_pages = 0;
                         usage >> num_pages;
                         constexpr rlim_t kRoomBytes = rlim_t{64} << 20;
                         const rlim_t limit = num_pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + kRoomBytes;
                         const rlimit address_space{.rlim_cur = limit, .rlim_max = limit};
                         if (setrlimit(RLIMIT_AS, &address_space) != 0) return 1;
                         const auto ends = run_rank_threads(64, kNoTimeout, [](int, auto bootstrap) {
                           return encode_status((*bootstrap)->all_gather({}, 60 * kNsPerSecond).status());
                         });
                         return pipe.send(encode_status(ends.status())) ? 0 : 1;
                       }).value();
  child.wait();
  const Status status = decode_status(child.report());
  EXPECT_EQ(status.code(), ErrorCode::kSystem) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot start a thread for rank"));
}

}  // namespace
}  // namespace ferry::launch
