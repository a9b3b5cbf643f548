/// `ferry bench --op put|get|signal|fadd` as a user sees it. No timing is judged.

#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

json report_of(std::vector<std::string> more) {
  std::vector<std::string> arguments{"bench", "--backend", "cpu", "--iterations", "3", "--warmup", "1", "--json", "-"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const CommandEnd end = run_ferry(arguments);
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  return end.exit_code == 0 ? json::parse(end.standard_output) : json{{"results", json::array()}};
}

TEST(OneSidedBench, CopiesHaveSizesAndAReferenceInsideANode) {
  for (const char* op : {"put", "get"}) {
    const json report = report_of({"--op", op, "--ranks", "3"});
    EXPECT_EQ(report["op"], op);
    EXPECT_EQ(report["num_ranks"], 3);
    ASSERT_EQ(report["results"].size(), 5U);
    EXPECT_EQ(report["results"][0]["num_bytes"], 8);
    for (const json& result : report["results"]) {
      EXPECT_GT(result["window_p50_ns"].get<std::int64_t>(), 0);
      EXPECT_TRUE(result.contains("plain_window_p50_ns"));
    }
  }
}

TEST(OneSidedBench, WordsHaveOneSizeAndTwoRanksUnlessToldOtherwise) {
  for (const char* op : {"signal", "fadd"}) {
    const json report = report_of({"--op", op});
    EXPECT_EQ(report["num_ranks"], 2);
    EXPECT_EQ(report["results"].size(), 1U);
  }
}

TEST(OneSidedBench, OtherNodesHaveNoReference) {
  const json report = report_of({"--op", "put", "--nodes", "2"});
  ASSERT_EQ(report["results"].size(), 5U);
  for (const json& result : report["results"]) EXPECT_FALSE(result.contains("plain_window_p50_ns"));
}

TEST(OneSidedBench, OneRankIsNotEnough) {
  const CommandEnd end = run_ferry({"bench", "--op", "put", "--backend", "cpu", "--ranks", "1"});
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_TRUE(contains(end.standard_error, "two ranks")) << end.standard_error;
}

}  // namespace
}  // namespace ferry::testing
