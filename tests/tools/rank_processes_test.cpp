/// Ranks as processes of the `ferry` command: no process outlives a run, whichever is killed, and a launcher's ranks
/// work as forked ranks do.

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <string>
#include <vector>

#include "ferry/transports.hpp"
#include "launch/meeting_point.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

constexpr int kPatienceMs = 20'000;

/// Runs until it is killed, or for more iterations than any test waits for.
const std::vector<std::string> endless_bench = {"bench",    "--backend", "cpu",      "--ranks",      "3",
                                                "--tokens", "16",        "--hidden", "64",           "--topk",
                                                "2",        "--experts", "8",        "--iterations", "1000000"};

void expect_gone(const std::vector<pid_t>& pids) {
  for (pid_t pid : pids) EXPECT_TRUE(wait_until_gone(pid, kPatienceMs)) << pid;
}

TEST(RankProcesses, AKilledRankEndsTheRunAndIsNamed) {
  RunningCommand command(endless_bench);
  ASSERT_TRUE(command.wait_for_error_text("warm-up"));
  const std::vector<pid_t> ranks = command.children();
  ASSERT_EQ(ranks.size(), 3U);
  kill(ranks[1], SIGKILL);
  const CommandEnd end = command.wait();
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_NE(end.standard_error.find("rank 1 was killed by signal 9"), std::string::npos) << end.standard_error;
  expect_gone(ranks);
}

TEST(RankProcesses, AKilledParentTakesItsRanksAlong) {
  // Orphans are reparented to this process, which reaps them: the first process of some containers does not.
  ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  RunningCommand command(endless_bench);
  ASSERT_TRUE(command.wait_for_error_text("warm-up"));
  const std::vector<pid_t> ranks = command.children();
  ASSERT_EQ(ranks.size(), 3U);
  kill(command.pid(), SIGKILL);
  EXPECT_EQ(command.wait().signal, SIGKILL);
  expect_gone(ranks);
  for (pid_t rank : ranks) {
    int status = 0;
    EXPECT_EQ(waitpid(rank, &status, WNOHANG), rank);
    EXPECT_TRUE(WIFSIGNALED(status));
  }
}

TEST(RankProcesses, AnInterruptEndsEverything) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    RunningCommand command(endless_bench);
    ASSERT_TRUE(command.wait_for_error_text("warm-up"));
    const std::vector<pid_t> ranks = command.children();
    ASSERT_EQ(ranks.size(), 3U);
    kill(command.pid(), signal);
    EXPECT_EQ(command.wait().signal, signal);
    expect_gone(ranks);
  }
}

/// A port that is free now. Another process could take it before the command does, but other tests on this machine do
/// not.
std::string free_port() {
  const auto point = launch::MeetingPoint::open().value();
  point.close_listener();
  return std::to_string(point.port);
}

Environment launcher_environment(int rank, const std::string& port) {
  return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"},  {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "127.0.0.1"},   {"FERRY_PORT", port}, {"FERRY_SECRET", "a secret of this test"}};
}

TEST(RankProcesses, ALaunchersRanksRunTheDemoTogether) {
  const std::vector<std::string> arguments = {"demo", "--tokens", "24", "--scale", "64"};
  for (bool spoiled : {false, true}) {
    auto spoiled_arguments = arguments;
    if (spoiled) spoiled_arguments.insert(spoiled_arguments.end(), {"--spoil-token", "40"});
    const std::string port = free_port();
    RunningCommand first(spoiled_arguments, launcher_environment(0, port));
    RunningCommand second(spoiled_arguments, launcher_environment(1, port));
    const CommandEnd second_end = second.wait();
    const CommandEnd first_end = first.wait();
    // Every process exits with the verdict; rank 0 prints it.
    EXPECT_EQ(first_end.exit_code, spoiled ? 1 : 0) << first_end.standard_output << first_end.standard_error;
    EXPECT_EQ(second_end.exit_code, spoiled ? 1 : 0) << second_end.standard_output << second_end.standard_error;
    EXPECT_NE(first_end.standard_output.find("started by torchrun"), std::string::npos) << first_end.standard_output;
    EXPECT_NE(first_end.standard_output.find(spoiled ? "MISMATCH" : "verified: 48 tokens"), std::string::npos);
    EXPECT_EQ(second_end.standard_output, "");
  }
}

TEST(RankProcesses, ALaunchersRanksRunTheBenchTogether) {
  const std::vector<std::string> arguments = {"bench", "--tokens",  "16", "--hidden",     "64", "--topk",
                                              "2",     "--experts", "8",  "--iterations", "3"};
  const std::string port = free_port();
  RunningCommand first(arguments, launcher_environment(0, port));
  RunningCommand second(arguments, launcher_environment(1, port));
  const CommandEnd second_end = second.wait();
  const CommandEnd first_end = first.wait();
  EXPECT_EQ(first_end.exit_code, 0) << first_end.standard_output << first_end.standard_error;
  EXPECT_EQ(second_end.exit_code, 0) << second_end.standard_error;
}

TEST(RankProcesses, FindThemselvesOnOneHostWhereNoVariableGivesIt) {
  const std::string port = free_port();
  Environment environment = launcher_environment(0, port);
  environment[2].second = "";  // LOCAL_WORLD_SIZE
  const std::vector<std::string> arguments = {"demo", "--tokens", "24", "--scale", "64"};
  RunningCommand first(arguments, environment);
  environment[0].second = "1";  // RANK
  RunningCommand second(arguments, environment);
  const CommandEnd second_end = second.wait();
  const CommandEnd first_end = first.wait();
  EXPECT_EQ(first_end.exit_code, 0) << first_end.standard_output << first_end.standard_error;
  EXPECT_EQ(second_end.exit_code, 0) << second_end.standard_error;
  EXPECT_NE(first_end.standard_output.find("2 ranks started by torchrun; each process"), std::string::npos)
      << first_end.standard_output;
}

TEST(RankProcesses, WithoutTheOthersFailAfterTheDeadline) {
  Environment environment = launcher_environment(1, free_port());
  environment[2].second = "";  // LOCAL_WORLD_SIZE
  RunningCommand alone({"bench", "--timeout", "0.5"}, environment);
  const CommandEnd end = alone.wait();
  EXPECT_EQ(end.exit_code, 1) << end.standard_error;
  EXPECT_NE(end.standard_error.find("could not connect to rank 0"), std::string::npos) << end.standard_error;
}

/// Two hosts by the launcher's variables; it makes no difference to the ranks that both are this host.
TEST(RankProcesses, ALaunchersHostsAreNodes) {
  for (const TransportInfo& transport : transports()) {
    if (transport.name == "ucx" && !transport.available) GTEST_SKIP() << transport.reason;
  }
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"demo", "--tokens", "24", "--scale", "64"},
        std::vector<std::string>{"bench", "--tokens", "16", "--hidden", "64", "--topk", "2", "--experts", "8",
                                 "--iterations", "3"}}) {
    const std::string port = free_port();
    Environment environment = launcher_environment(0, port);
    environment[2].second = "1";  // LOCAL_WORLD_SIZE
    RunningCommand first(arguments, environment);
    environment[0].second = "1";  // RANK
    RunningCommand second(arguments, environment);
    const CommandEnd second_end = second.wait();
    const CommandEnd first_end = first.wait();
    EXPECT_EQ(first_end.exit_code, 0) << first_end.standard_output << first_end.standard_error;
    EXPECT_EQ(second_end.exit_code, 0) << second_end.standard_error;
    EXPECT_NE(first_end.standard_output.find("started by torchrun on 2 hosts"), std::string::npos)
        << first_end.standard_output;
    EXPECT_NE(first_end.standard_output.find("between 2 nodes of 1 rank "), std::string::npos)
        << first_end.standard_output;
  }
}

TEST(RankProcesses, RanksOptionMustAgreeWithTheLauncher) {
  const CommandEnd end = run_ferry({"demo", "--ranks", "5"}, launcher_environment(0, "29999"));
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_NE(end.standard_error.find("--ranks 5 disagrees with the launcher, which started 2"), std::string::npos)
      << end.standard_error;
}

TEST(RankProcesses, ForkIgnoresTheLauncherWhenAsked) {
  const CommandEnd end = run_ferry({"demo", "--ranks", "3", "--launch", "fork", "--tokens", "8", "--scale", "64"},
                                   launcher_environment(0, "29999"));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_NE(end.standard_output.find("3 ranks, each a process forked"), std::string::npos) << end.standard_output;
}

}  // namespace
}  // namespace ferry::testing
