/// Records of a group whose ranks are processes, as another process reads them, and the sentence about a rank at fault
/// in the errors of the others.

#include "ferry/recorded_calls.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "fault/small_exchange.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr int kNumRanks = 3;
constexpr int kVictim = 1;

GroupOptions options() {
  GroupOptions options{.backend = "cpu"};
  options.timeout_ns = kFaultTimeoutNs;
  return options;
}

/// The only group of this process.
RecordedGroup own_group(RankContext& context) {
  Result<std::vector<RecordedGroup>> groups = recorded_calls(getpid());
  if (!context.expect_ok(groups.status(), "recorded_calls")) return {};
  if (!context.expect(groups->size() == 1, fmt::format("{} groups", groups->size()))) return {};
  return groups->front();
}

void expect_said(RankContext& context, const Status& status, std::string_view words) {
  context.expect(status.message().find(words) != std::string_view::npos, status.to_string());
}

TEST(RecordedCalls, ShowAllRanksOfAGroupThatWorks) {
  run_ranks({RankKind::kProcesses, kNumRanks}, [](RankContext& context) {
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options());
    if (!context.expect_ok(group.status(), "create")) return;
    SmallExchange exchange(**group, false);
    context.expect_ok(exchange.run_and_verify(), "exchange");
    const RecordedGroup seen = own_group(context);
    context.expect(seen.num_ranks == kNumRanks && std::ssize(seen.ranks) == kNumRanks, "all ranks have a record");
    const RecordedRank& mine = seen.ranks[static_cast<std::size_t>(context.rank())];
    context.expect(mine.pid == getpid() && mine.process == ProcessState::kRunning && !mine.has_left, "own process");
    context.expect(mine.calls.size() == 3 && mine.calls[1].operation == "dispatch", "own calls");
    context.expect(mine.calls[1].num_tokens == SmallExchange::kNumTokens, "tokens");
    context.expect(mine.calls[1].row_bytes == SmallExchange::kRowBytes, "bytes of a row");
    const auto json = nlohmann::json::parse(seen.to_json());
    context.expect(json["ranks"].size() == kNumRanks && json["ranks"][0]["calls"][0]["operation"] == "route", "JSON");
    context.expect(json["diagnosis"]["kind"] == to_string(seen.diagnosis.kind), "JSON's diagnosis");
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

TEST(RecordedCalls, OfAKilledRankStayWithItsPeers) {
  const std::vector<std::string> failures =
      collect_rank_failures({RankKind::kProcesses, kNumRanks}, [](RankContext& context) {
        Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options());
        if (!context.expect_ok(group.status(), "create")) return;
        SmallExchange exchange(**group, false);
        context.expect_ok(exchange.run_and_verify(), "exchange");
        if (context.rank() == kVictim) raise(SIGKILL);
        const Status status = exchange.route();
        context.expect_code(status, ErrorCode::kPeerLost, "route");
        // The loss shows first in the victim's socket, so its process may not have ended yet.
        expect_said(context, status, fmt::format("; rank {} returned from combine (call 3)", kVictim));
        const RecordedGroup seen = own_group(context);
        context.expect(seen.diagnosis.rank == kVictim, seen.diagnosis.text);
        context.expect(!seen.ranks.at(kVictim).calls.empty(), "the victim's calls");
      });
  EXPECT_EQ(failures, std::vector{fmt::format("rank {}: died of signal 9", kVictim)});
}

TEST(RecordedCalls, OfALateRankSayThatItHasNotCalled) {
  run_ranks({RankKind::kProcesses, kNumRanks}, [](RankContext& context) {
    Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options());
    if (!context.expect_ok(group.status(), "create")) return;
    SmallExchange exchange(**group, false);
    context.expect_ok(exchange.route(), "route");
    if (context.rank() == kVictim) {
      // Late until the others have given up, which their records show.
      const auto gave_up = [&] {
        const RecordedGroup seen = own_group(context);
        return std::ranges::any_of(seen.ranks, [](const RecordedRank& rank) {
          return !rank.calls.empty() && rank.calls.back().phase == CallPhase::kFailed;
        });
      };
      while (context.failures().empty() && !gave_up()) usleep(1000);
      context.expect(own_group(context).diagnosis.kind == DiagnosisKind::kLate, own_group(context).diagnosis.text);
      context.expect_code(exchange.dispatch(), ErrorCode::kTimeout, "late dispatch");
      return;
    }
    const Status status = exchange.dispatch();
    context.expect_code(status, ErrorCode::kTimeout, "dispatch");
    expect_said(context, status, fmt::format("; rank {} returned from route (call 1) ", kVictim));
    expect_said(context, status, "and has made no call since");
  });
}

TEST(RecordedCalls, OfProcessesWithoutAGroupAreNone) {
  const Result<std::vector<RecordedGroup>> mine = recorded_calls(getpid());
  ASSERT_TRUE(mine.ok());
  EXPECT_TRUE(mine->empty());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(0);
  int exit_status = 0;
  ASSERT_EQ(waitpid(child, &exit_status, 0), child);
  const Result<std::vector<RecordedGroup>> ended = recorded_calls(child);
  EXPECT_EQ(ended.status().code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(ended.status().message().find(fmt::format("process {} does not exist", child)), std::string_view::npos);
}

}  // namespace
}  // namespace ferry::test
