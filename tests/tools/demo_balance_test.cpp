/// `ferry demo --experts balance`: experts move between two halves of the tokens, and the layer stays right.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "tools/demo_run.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

constexpr int kNumTokens = 240;

/// Eight experts on four ranks; rank 0 has the two experts that tokens choose most.
std::string uneven_trace() {
  std::string trace = R"({"type": "meta", "num_experts": 8, "topk": 2})";
  for (int token = 0; token < kNumTokens; ++token) {
    const int often = token % 2;
    const int seldom = 2 + token / 2 % 6;
    trace += "\n{\"topk_ids\": [" + std::to_string(often) + ", " + std::to_string(seldom) +
             "], \"topk_weights\": [0.75, 0.25]}";
  }
  return trace;
}

json run_balanced(const std::string& trace, std::vector<std::string> more) {
  const TemporaryFile file;
  const TemporaryFile trace_file(trace);
  std::vector<std::string> arguments = {
      "demo",    "--experts", "balance", "--backend",       "cpu",      "--ranks",  "4",
      "--scale", "64",        "--trace", trace_file.path(), "--report", file.path()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const CommandEnd end = run_ferry(arguments);
  EXPECT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "second half, moved")) << end.standard_output;
  return json::parse(file.read());
}

std::vector<std::int64_t> rows(const json& experts, const char* half) { return experts[half]["rows_per_rank"]; }

TEST(DemoBalance, ExpertsMoveTheLoadEvensAndTheLayerIsRight) {
  const json report = run_balanced(uneven_trace(), {});
  EXPECT_TRUE(report["verified"]);
  const json& experts = report["experts"];
  // In a half of 120 tokens, rank 0's two experts have 120 entries, and the experts of each other rank 40.
  EXPECT_EQ(rows(experts, "first_half"), (std::vector<std::int64_t>{120, 40, 40, 40}));
  EXPECT_EQ(rows(experts, "second_half_had_they_stayed"), (std::vector<std::int64_t>{120, 40, 40, 40}));
  // Each of the two shares a rank with one other expert: 60 + 20.
  auto moved = rows(experts, "second_half");
  EXPECT_EQ(std::accumulate(moved.begin(), moved.end(), std::int64_t{0}), 240);
  EXPECT_EQ(*std::max_element(moved.begin(), moved.end()), 80);
  EXPECT_EQ(experts["moved"], 2);
  auto placement = experts["physical_to_logical"].get<std::vector<int>>();
  std::sort(placement.begin(), placement.end());
  EXPECT_EQ(placement, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(DemoBalance, ReplicasTakeTurnsOverNodes) {
  const json report = run_balanced(uneven_trace(), {"--replicas", "4", "--nodes", "2", "--dtype", "fp8"});
  EXPECT_TRUE(report["verified"]);
  expect_load(report);
  const json& experts = report["experts"];
  EXPECT_EQ(experts["physical_to_logical"].size(), 12U);
  EXPECT_LE(experts["second_half"]["max_over_mean"], 1.1);
  for (const char* half : {"first_half", "second_half"}) {
    const auto sent = experts[half]["network_bytes"].get<std::int64_t>();
    EXPECT_GE(sent, experts[half]["network_formula_bytes"].get<std::int64_t>()) << half;
  }
}

TEST(DemoBalance, ExpertsThatRanksDoNotDivideGetReplicas) {
  const json report = run_balanced(kTrace, {});
  EXPECT_TRUE(report["verified"]);
  EXPECT_EQ(report["experts"]["physical_to_logical"].size(), 8U);
  EXPECT_EQ(report["rows_per_expert"], json(kTraceRowsPerExpert));
}

TEST(DemoBalance, RefusesWhatDoesNotGoTogether) {
  for (const auto& [arguments, said] : std::vector<std::pair<std::vector<std::string>, const char*>>{
           {{"demo", "--experts", "balance", "--mode", "latency"}, "--experts balance is for --mode throughput"},
           {{"demo", "--replicas", "8"}, "--replicas is for --experts balance"}}) {
    const CommandEnd end = run_ferry(arguments);
    EXPECT_EQ(end.exit_code, 2);
    EXPECT_TRUE(contains(end.standard_error, said)) << end.standard_error;
  }
}

}  // namespace
}  // namespace ferry::testing
