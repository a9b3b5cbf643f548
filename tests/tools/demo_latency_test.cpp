/// `ferry demo --mode latency` as a user sees it: verdict, exit code, report.

#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/demo_run.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

/// Three steps of five tokens a rank.
std::vector<std::string> small_demo(const std::vector<std::string>& more) {
  std::vector<std::string> arguments = demo_arguments(5, {"--mode", "latency", "--steps", "3"});
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(LatencyDemo, VerifiesEachStepAndReportsConsistentFigures) {
  const TemporaryFile file;
  const CommandEnd end = run_ferry(small_demo({"--report", file.path()}));
  ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "latency: 3 steps of up to 5 tokens a rank")) << end.standard_output;
  EXPECT_TRUE(contains(end.standard_output, "verified: 60 tokens of 3 steps")) << end.standard_output;
  const json report = json::parse(file.read());
  constexpr std::int64_t kRows = 4 * 3 * 5 * 8;  // ranks, steps, tokens, top-k of the default model, all distinct
  EXPECT_EQ(report["mode"], "latency");
  EXPECT_EQ(report["steps"], 3);
  EXPECT_EQ(sum_over_ranks(report, "tokens"), 60);
  EXPECT_EQ(sum_over_ranks(report, "sent_rows"), kRows);
  EXPECT_EQ(sum_over_ranks(report, "received_rows"), kRows);
  std::int64_t load = 0;
  for (const json& rows : report["rows_per_expert"]) load += rows.get<std::int64_t>();
  EXPECT_EQ(load, kRows);
  EXPECT_FALSE(report["per_rank"][0].contains("route_ns")) << "routing is part of the dispatch";
  EXPECT_GT(report["per_rank"][0]["dispatch_ns"].get<std::int64_t>(), 0);
  expect_load(report);
}

TEST(LatencyDemo, RunsEightStepsUnlessToldOtherwise) {
  const CommandEnd end = run_ferry({"demo", "--backend", "cpu", "--mode", "latency", "--scale", "64"});
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "verified: 1024 tokens of 8 steps")) << end.standard_output;
}

TEST(LatencyDemo, VerifiesFp8AndSeveralNodes) {
  for (const char* dtype : {"bf16", "fp8"}) {
    const TemporaryFile file;
    const CommandEnd end = run_ferry(small_demo({"--dtype", dtype, "--nodes", "2", "--report", file.path()}));
    ASSERT_EQ(end.exit_code, 0) << dtype << end.standard_output << end.standard_error;
    const json network = json::parse(file.read())["network"];
    EXPECT_GT(network["dispatch"]["formula_bytes"].get<std::int64_t>(), 0);
    EXPECT_GT(network["dispatch"]["sent_bytes"], network["dispatch"]["formula_bytes"]);
    EXPECT_GT(network["combine"]["sent_bytes"], network["combine"]["formula_bytes"]);
  }
  EXPECT_EQ(run_ferry(small_demo({"--dtype", "fp8"})).exit_code, 0);
}

TEST(LatencyDemo, NamesTheFirstDifferingToken) {
  const CommandEnd end = run_ferry(small_demo({"--spoil-token", "37"}));
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_TRUE(contains(end.standard_output, "MISMATCH: 1 of 60 tokens differ; the first is token 37"))
      << end.standard_output;
}

TEST(LatencyDemo, StepsMayBeEmptyAndRanksWithoutTokens) {
  const TemporaryFile text("abc");
  const CommandEnd end = run_ferry(small_demo({"--text", text.path()}));
  EXPECT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "verified: 3 tokens of 3 steps")) << end.standard_output;
}

TEST(LatencyDemo, FollowsATrace) {
  const TemporaryFile trace(kTrace);
  const TemporaryFile file;
  const CommandEnd end = run_ferry(small_demo({"--trace", trace.path(), "--report", file.path()}));
  ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  EXPECT_EQ(json::parse(file.read())["rows_per_expert"], json(kTraceRowsPerExpert));
}

TEST(LatencyDemo, RefusesWhatDoesNotGoTogether) {
  struct Refusal {
    std::vector<std::string> arguments;
    const char* message;
  };
  const std::vector<Refusal> all = {
      {{"demo", "--steps", "4"}, "--steps is for --mode latency"},
      {{"demo", "--mode", "latency", "--tokens", "1025"}, "--tokens 1025 with --mode latency: expected at most 1024"},
      {{"demo", "--mode", "latency", "--steps", "0"}, "--steps"},
      {{"demo", "--mode", "fast"}, "fast not in {throughput,latency}"},
  };
  for (const Refusal& refusal : all) {
    const CommandEnd end = run_ferry(refusal.arguments);
    EXPECT_EQ(end.exit_code, 2) << refusal.message;
    EXPECT_TRUE(contains(end.standard_error, refusal.message)) << end.standard_error;
    EXPECT_EQ(end.standard_output, "");
  }
}

}  // namespace
}  // namespace ferry::testing
