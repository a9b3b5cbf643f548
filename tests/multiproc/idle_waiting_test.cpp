/// Ranks that wait for a stalled rank leave the cores to other processes.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "fault/small_exchange.hpp"
#include "fault/trap_memory.hpp"
#include "node/futex.hpp"
#include "support/rank_runner.hpp"
#include "support/sanitizers.hpp"

namespace ferry::test {
namespace {

std::int64_t cpu_time_ns() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const std::int64_t seconds = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec;
  const std::int64_t microseconds = usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
  return seconds * kNsPerSecond + microseconds * 1000;
}

TEST(IdleWaiting, EightRanksThatWaitForANinthUseUnderATenthOfACore) {
  constexpr int kNumRanks = 9;
  constexpr int kStalled = 8;
  constexpr std::int64_t kTimeoutNs = 2 * kNsPerSecond;
  SharedWords* words = make_shared_words();
  run_ranks({.kind = RankKind::kProcesses, .num_ranks = kNumRanks}, [=](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.timeout_ns = kTimeoutNs;
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "create")) return;
    if (context.rank() == kStalled) return wait_for_survivors(words, kNumRanks - 1);
    SmallExchange exchange(**group, true);
    const std::int64_t before_ns = cpu_time_ns();
    const Status status = exchange.route();
    words->processor_time_ns.fetch_add(cpu_time_ns() - before_ns);
    context.expect_code(status, ErrorCode::kTimeout, "route");
    context.expect(status.peer() == kStalled, status.to_string());
    report_survivor_done(words);
  });
  RecordProperty("processor_time_us", static_cast<int>(words->processor_time_ns.load() / 1000));
  if (kSanitized) return;  // it would measure the sanitizer
  EXPECT_LT(words->processor_time_ns.load(), kTimeoutNs / 10)
      << "processor time of all eight together, of " << kTimeoutNs << " ns waited";
}

}  // namespace
}  // namespace ferry::test
