/// The `ferry` command over emulated GPUs: its runs must end with correct results. Timings are not checked.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "launch/meeting_point.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

/// Runs the command with the arguments, the way in which ranks run, and a deadline after which a stalled rank is
/// reported.
CommandEnd run_on_gpus(std::vector<std::string> arguments, const std::vector<std::string>& how) {
  arguments.insert(arguments.end(), {"--backend", "cuda", "--timeout", "20"});
  arguments.insert(arguments.end(), how.begin(), how.end());
  return run_ferry(std::move(arguments));
}

class EmulatedCommand : public ::testing::TestWithParam<const char*> {
 protected:
  static std::vector<std::string> nodes(int num_ranks) {
    return {"--nodes", "2", "--ranks", std::to_string(num_ranks), "--launch", GetParam()};
  }
};

TEST_P(EmulatedCommand, DemoOverNodesIsVerified) {
  const CommandEnd end = run_on_gpus({"demo", "--tokens", "64"}, nodes(4));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "verified: ")) << end.standard_output;
}

TEST_P(EmulatedCommand, PairsOverNodesAreMeasured) {
  const CommandEnd end = run_on_gpus({"bench", "--op", "pair", "--tokens", "16", "--hidden", "128", "--experts", "8",
                                      "--topk", "2", "--iterations", "1", "--warmup", "1"},
                                     nodes(2));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "pair")) << end.standard_output;
}

/// `ferry tune` with few settings, for a file.
CommandEnd tune(const std::string& file, std::vector<std::string> more, const std::vector<std::string>& how) {
  std::vector<std::string> arguments = {"tune", "--tokens",  "16", "--hidden",     "128", "--experts",
                                        "8",    "--topk",    "2",  "--iterations", "1",   "--warmup",
                                        "0",    "--num-sms", "4",  "--out",        file};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_on_gpus(std::move(arguments), how);
}

/// Whether the command, given the file, measures calls with it.
void expect_readable(const std::string& file, const std::vector<std::string>& how) {
  const CommandEnd end = run_on_gpus({"bench", "--op", "dispatch", "--tokens", "16", "--hidden", "128", "--experts",
                                      "8", "--topk", "2", "--iterations", "1", "--warmup", "0", "--tuning-file", file},
                                     how);
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
}

/// Settings are tried in the calls of every kind; which of them gain is up to the machine.
TEST_P(EmulatedCommand, SettingsOverNodesAreTuned) {
  const TemporaryFile file("");
  std::filesystem::remove(file.path());
  const CommandEnd end = tune(file.path(), {"--chunk-tokens", "2"}, nodes(2));
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  for (const char* tuned : {"dispatch bf16, 256 bytes, symmetric memory", "dispatch fp8, 128 bytes, symmetric memory",
                            "combine bf16, 256 bytes, symmetric memory", "combine bf16, 256 bytes, plain memory",
                            "for 2 nodes of 1 ranks"}) {
    EXPECT_TRUE(contains(end.standard_output, tuned)) << tuned << " in " << end.standard_output;
  }
  expect_readable(file.path(), nodes(2));
}

TEST(EmulatedTune, FindsSettingsOfLatencyModeOverNodes) {
  const TemporaryFile file("");
  std::filesystem::remove(file.path());
  const std::vector<std::string> how = {"--nodes", "2", "--ranks", "2", "--launch", "threads"};
  const CommandEnd end =
      tune(file.path(), {"--mode", "latency", "--chunk-tokens", "2", "--quantize", "fp8", "--split"}, how);
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  for (const char* tuned : {"latency-dispatch fp8, 128 bytes", "latency-combine bf16, 256 bytes, symmetric memory",
                            "latency-combine bf16, 256 bytes, plain memory", "in latency mode"}) {
    EXPECT_TRUE(contains(end.standard_output, tuned)) << tuned << " in " << end.standard_output;
  }
  expect_readable(file.path(), how);
}

/// As on a cluster: each process is a rank, and all of them measure one group after another.
TEST(EmulatedTune, RunsInTheRanksOfALauncher) {
  const TemporaryFile file("");
  std::filesystem::remove(file.path());
  const auto point = launch::MeetingPoint::open().value();
  point.close_listener();
  const auto start = [&](const std::string& rank) {
    return std::make_unique<RunningCommand>(
        std::vector<std::string>{"tune",     "--tokens",  "8", "--hidden",       "128", "--experts",
                                 "8",        "--topk",    "2", "--iterations",   "1",   "--warmup",
                                 "0",        "--num-sms", "4", "--chunk-tokens", "2",   "--backend",
                                 "cuda",     "--nodes",   "2", "--timeout",      "20",  "--out",
                                 file.path()},
        Environment{{"RANK", rank},
                    {"WORLD_SIZE", "2"},
                    {"LOCAL_WORLD_SIZE", "2"},
                    {"MASTER_ADDR", "127.0.0.1"},
                    {"FERRY_PORT", std::to_string(point.port)},
                    {"FERRY_SECRET", "a secret of this test"}});
  };
  const auto first = start("0");
  const auto second = start("1");
  const CommandEnd second_end = second->wait();
  const CommandEnd first_end = first->wait();
  EXPECT_EQ(first_end.exit_code, 0) << first_end.standard_error;
  EXPECT_EQ(second_end.exit_code, 0) << second_end.standard_error;
  EXPECT_TRUE(contains(first_end.standard_output, "for 2 nodes of 1 ranks")) << first_end.standard_output;
  EXPECT_EQ(second_end.standard_output, "");
  EXPECT_TRUE(contains(file.read(), "\"num_nodes\": 2"));
}

TEST(EmulatedTune, FindsSettingsInANodeForBothModes) {
  const TemporaryFile file("");
  std::filesystem::remove(file.path());
  const std::vector<std::string> how = {"--ranks", "2", "--launch", "fork"};
  for (const std::vector<std::string>& mode : {std::vector<std::string>{"--layout", "slab", "--chunk-tokens", "64"},
                                               {"--mode", "latency", "--quantize", "fp8"}}) {
    const CommandEnd end = tune(file.path(), mode, how);
    EXPECT_EQ(end.exit_code, 0) << mode.front() << ": " << end.standard_error;
    EXPECT_TRUE(contains(end.standard_output, "built-in")) << end.standard_output;
  }
  expect_readable(file.path(), how);
}

TEST(EmulatedTune, RefusesWhatTheModeDoesNotTake) {
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"--split"}, {"--mode", "latency", "--layout", "experts"}, {"--hidden", "100"}}) {
    std::vector<std::string> arguments = {"tune"};
    arguments.insert(arguments.end(), wrong.begin(), wrong.end());
    EXPECT_EQ(run_on_gpus(std::move(arguments), {"--ranks", "2"}).exit_code, 2) << wrong.front();
  }
}

/// Regression test for a deadlock of rank threads: CUDA loads a kernel at its first launch and may wait for the GPU to
/// be idle, while the kernel of the other rank waited for the kernel being loaded.
TEST_P(EmulatedCommand, OneSidedCallsOfKernelsAreMeasured) {
  for (const char* op : {"put", "fadd"}) {
    const CommandEnd end = run_on_gpus({"bench", "--op", op, "--iterations", "1", "--warmup", "1"}, nodes(2));
    EXPECT_EQ(end.exit_code, 0) << op << ": " << end.standard_error;
    EXPECT_TRUE(contains(end.standard_output, "M calls/s")) << end.standard_output;
  }
}

/// CUDA loads kernels late unless a variable says otherwise.
TEST(EmulatedDoctor, WarnsWhereAGpuIsAndNothingSaysWhenKernelsAreLoaded) {
  ASSERT_EQ(unsetenv("CUDA_MODULE_LOADING"), 0);
  const CommandEnd end = run_ferry({"doctor"});
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "  warn     gpu loading   CUDA_MODULE_LOADING is not set"))
      << end.standard_output;
}

INSTANTIATE_TEST_SUITE_P(Launch, EmulatedCommand, ::testing::Values("threads", "fork"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace ferry::testing
