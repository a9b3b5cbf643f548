#include "support/rank_runner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <set>

namespace ferry::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class RankRunner : public ::testing::TestWithParam<RankKind> {
 protected:
  RankRun run(int num_ranks) const { return {GetParam(), num_ranks, std::chrono::seconds(30)}; }
};

std::vector<std::byte> one_byte(int value) { return {static_cast<std::byte>(value)}; }

TEST_P(RankRunner, EveryRankRunsAndReachesTheOthers) {
  const auto failures = collect_rank_failures(run(5), [](RankContext& context) {
    const auto all = context.bootstrap()->all_gather(one_byte(context.rank() + 10), 10 * kNsPerSecond);
    if (!context.expect_ok(all.status(), "all_gather")) return;
    for (int rank = 0; rank < 5; ++rank)
      context.expect((*all)[static_cast<std::size_t>(rank)] == one_byte(rank + 10), "wrong message");
    context.expect(context.bootstrap()->rank() == context.rank(), "wrong rank");
  });
  EXPECT_THAT(failures, IsEmpty());
}

TEST_P(RankRunner, FailuresNameTheirRank) {
  const auto failures = collect_rank_failures(run(3), [](RankContext& context) {
    if (context.rank() == 1) context.fail("first");
    if (context.rank() == 1) context.fail("second");
    if (context.rank() == 2) throw std::runtime_error("third");
    if (context.rank() == 0) context.expect_code({}, ErrorCode::kTimeout, "fourth");
  });
  EXPECT_THAT(failures, ElementsAre("rank 0: fourth: expected kTimeout, got kOk", "rank 1: first", "rank 1: second",
                                    "rank 2: threw: third"));
}

INSTANTIATE_TEST_SUITE_P(Kinds, RankRunner, ::testing::Values(RankKind::kThreads, RankKind::kProcesses),
                         [](const auto& test) { return test.param == RankKind::kThreads ? "threads" : "processes"; });

TEST(RankRunnerProcesses, ADeadRankIsReported) {
  const auto failures =
      collect_rank_failures({RankKind::kProcesses, 2, std::chrono::seconds(30)}, [](RankContext& context) {
        if (context.rank() == 1) raise(SIGKILL);
      });
  EXPECT_THAT(failures, ElementsAre("rank 1: died of signal 9"));
}

TEST(RankRunnerProcesses, AHangingRankIsKilledAndReported) {
  const auto failures =
      collect_rank_failures({RankKind::kProcesses, 2, std::chrono::seconds(2)}, [](RankContext& context) {
        if (context.rank() == 0) pause();
      });
  EXPECT_THAT(failures, ElementsAre(HasSubstr("rank 0: watchdog")));
}

TEST(RankRunnerProcesses, AGoogleTestFailureInAChildIsReported) {
  const auto failures = collect_rank_failures({RankKind::kProcesses, 1, std::chrono::seconds(30)}, [](RankContext&) {
    // The child reports the failure; it must reach the parent too.
    ::testing::UnitTest::GetInstance()->listeners().Release(
        ::testing::UnitTest::GetInstance()->listeners().default_result_printer());
    ADD_FAILURE() << "on purpose";
  });
  EXPECT_THAT(failures, ElementsAre(HasSubstr("GoogleTest assertion")));
}

}  // namespace
}  // namespace ferry::test
