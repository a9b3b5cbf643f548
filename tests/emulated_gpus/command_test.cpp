/// The `ferry` command over emulated GPUs: its runs must end with correct results. Timings are not checked.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

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
