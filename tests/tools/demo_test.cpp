/// `ferry demo` as a user sees it: verdict, exit code, report.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "tools/demo_run.hpp"
#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;
using ::testing::Values;

std::vector<std::string> small_demo(const std::vector<std::string>& more) { return demo_arguments(24, more); }

TEST(Demo, VerifiesAndReportsConsistentFigures) {
  const TemporaryFile file;
  const CommandEnd end = run_ferry(small_demo({"--report", file.path()}));
  ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "verified: 96 tokens")) << end.standard_output;

  const json report = json::parse(file.read());
  constexpr std::int64_t kRows = 4 * 24 * 8;  // ranks, tokens, top-k of the default model, all distinct
  EXPECT_TRUE(report["verified"].get<bool>());
  EXPECT_GT(report["largest_error"].get<double>(), 0.0);
  EXPECT_LE(report["largest_share_of_bound"].get<double>(), 1.0);
  ASSERT_EQ(report["per_rank"].size(), 4U);
  EXPECT_EQ(sum_over_ranks(report, "tokens"), 96);
  EXPECT_EQ(sum_over_ranks(report, "sent_rows"), kRows);
  EXPECT_EQ(sum_over_ranks(report, "received_rows"), kRows);
  EXPECT_EQ(sum_over_ranks(report, "sent_bytes"), kRows * report["row_bytes"].get<std::int64_t>());
  const auto load = report["rows_per_expert"].get<std::vector<std::int64_t>>();
  EXPECT_EQ(load.size(), 256U);
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), std::int64_t{0}), kRows);
  expect_load(report);
  EXPECT_TRUE(contains(end.standard_output, "load of ranks: max/mean ")) << end.standard_output;
  EXPECT_TRUE(contains(end.standard_output, "waits for other ranks")) << end.standard_output;
}

class DemoModels : public ::testing::TestWithParam<const char*> {};

TEST_P(DemoModels, Verifies) {
  for (const char* dtype : {"bf16", "fp8"}) {
    const CommandEnd end = run_ferry(small_demo({"--model", GetParam(), "--dtype", dtype}));
    EXPECT_EQ(end.exit_code, 0) << dtype << "\n" << end.standard_output << end.standard_error;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DemoModels,
                         Values("deepseek-v3", "qwen3-235b", "kimi-k2", "gpt-oss-120b", "mixtral-8x7b"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace_if(
                               name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
                           return name;
                         });

TEST(Demo, NamesTheFirstDifferingToken) {
  const TemporaryFile file;
  const CommandEnd end = run_ferry(small_demo({"--spoil-token", "57", "--report", file.path()}));
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_TRUE(contains(end.standard_output, "MISMATCH: 1 of 96 tokens differ; the first is token 57"))
      << end.standard_output;
  EXPECT_FALSE(contains(end.standard_output, "verified"));
  EXPECT_EQ(json::parse(file.read())["first_mismatch"]["token"], 57);
}

TEST(Demo, SameSeedSameFigures) {
  const TemporaryFile first;
  const TemporaryFile second;
  const TemporaryFile other;
  ASSERT_EQ(run_ferry(small_demo({"--seed", "5", "--report", first.path()})).exit_code, 0);
  ASSERT_EQ(run_ferry(small_demo({"--seed", "5", "--report", second.path()})).exit_code, 0);
  ASSERT_EQ(run_ferry(small_demo({"--seed", "6", "--report", other.path()})).exit_code, 0);
  const json a = json::parse(first.read());
  EXPECT_EQ(a["rows_per_expert"], json::parse(second.read())["rows_per_expert"]);
  EXPECT_EQ(a["largest_error"], json::parse(second.read())["largest_error"]);
  EXPECT_NE(a["rows_per_expert"], json::parse(other.read())["rows_per_expert"]);
}

TEST(Demo, RunsWithFewerTokensThanRanks) {
  const TemporaryFile text("abc");
  const CommandEnd end = run_ferry(small_demo({"--text", text.path()}));
  EXPECT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "verified: 3 tokens")) << end.standard_output;
}

TEST(Demo, FollowsATrace) {
  const TemporaryFile trace(kTrace);
  const TemporaryFile file;
  const CommandEnd end =
      run_ferry({"demo", "--ranks", "4", "--scale", "64", "--trace", trace.path(), "--report", file.path()});
  ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  const json report = json::parse(file.read());
  EXPECT_EQ(report["tokens"], 5);
  EXPECT_EQ(report["rows_per_expert"], json(kTraceRowsPerExpert));
}

TEST(Demo, AFolderWithOneTraceStandsForIt) {
  const TemporaryFolder folder;
  const auto write = [&folder](const char* name, const char* content) {
    std::ofstream(folder.path() + "/" + name) << content;
  };
  const auto run = [&folder] {
    return run_ferry({"demo", "--ranks", "4", "--scale", "64", "--experts", "balance", "--trace", folder.path()});
  };
  write("notes.txt", "not a trace");
  CommandEnd end = run();
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_TRUE(contains(end.standard_error, "Is a directory")) << end.standard_error;
  write("layer0.jsonl", kTrace);
  end = run();
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "verified: 5 tokens")) << end.standard_output;
  write("layer1.jsonl", kTrace);
  end = run();
  EXPECT_EQ(end.exit_code, 2) << "a folder with two traces is ambiguous";
  EXPECT_TRUE(contains(end.standard_error, "Is a directory")) << end.standard_error;
}

TEST(Demo, TraceNamesItsModel) {
  const TemporaryFile trace(R"({"type": "meta", "model": "Qwen1.5-MoE-A2.7B-Chat", "num_experts": 60, "topk": 1}
{"topk_ids": [59], "topk_weights": [0.5]})");
  const CommandEnd end = run_ferry({"demo", "--ranks", "2", "--scale", "32", "--trace", trace.path()});
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_TRUE(contains(end.standard_output, "hidden 64, intermediate 44, 60 experts")) << end.standard_output;
}

struct BadTrace {
  const char* name;
  const char* content;
  const char* message;
};

class DemoBadTraces : public ::testing::TestWithParam<BadTrace> {};

TEST_P(DemoBadTraces, AreRefusedWithTheLine) {
  const TemporaryFile trace(GetParam().content);
  const CommandEnd end = run_ferry({"demo", "--ranks", "2", "--trace", trace.path()});
  EXPECT_EQ(end.exit_code, 2);
  EXPECT_TRUE(contains(end.standard_error, GetParam().message)) << end.standard_error;
  EXPECT_EQ(end.standard_output, "");
}

INSTANTIATE_TEST_SUITE_P(
    All, DemoBadTraces,
    Values(BadTrace{"NotJson", "{\"topk_ids\": [1], \"topk_weights\": [1]}\nhello\n", "line 2: not a JSON object"},
           BadTrace{"NoWeights", "{\"topk_ids\": [1]}\n", "line 1: topk_weights is missing"},
           BadTrace{"LengthsDiffer", "{\"topk_ids\": [1, 2], \"topk_weights\": [1]}\n", "line 1: topk_ids and"},
           BadTrace{"TopkChanges",
                    "{\"topk_ids\": [1], \"topk_weights\": [1]}\n{\"topk_ids\": [1, 2], "
                    "\"topk_weights\": [1, 1]}\n",
                    "line 2: 2 ids; the lines before have 1"},
           BadTrace{"IdTooLarge", "{\"num_experts\": 2}\n{\"topk_ids\": [2], \"topk_weights\": [1]}\n",
                    "line 2: expert id 2 is not a whole number from -1 to 1"},
           BadTrace{"IdBeyondNumbers", "{\"topk_ids\": [18446744073709551615], \"topk_weights\": [1]}\n",
                    "line 1: expert id 18446744073709551615 is not a whole number"},
           BadTrace{"IdNotWhole", "{\"topk_ids\": [1.5], \"topk_weights\": [1]}\n", "line 1: expert id 1.5"},
           BadTrace{"WeightNotFinite", "{\"topk_ids\": [1], \"topk_weights\": [1e60]}\n", "line 1: weight 1e+60"},
           BadTrace{"MetaTooLate", "{\"topk_ids\": [1], \"topk_weights\": [1]}\n{\"num_experts\": 4}\n",
                    "line 2: topk_ids is missing"},
           BadTrace{"BadMeta", "{\"num_experts\": -3}\n", "line 1: num_experts is -3"},
           BadTrace{"NoToken", "\n", "line 1: the trace ends without a token"}, BadTrace{"Empty", "", "is empty"}),
    [](const auto& test) { return test.param.name; });

TEST(Demo, RefusesWrongArguments) {
  const TemporaryFile empty;
  const std::vector<std::vector<std::string>> all = {
      {"demo", "--ranks", "0"},
      {"demo", "--ranks", "eight"},
      {"demo", "--model", "gpt-2"},
      {"demo", "--nodes", "3"},
      {"demo", "--backend", "abacus"},
      {"demo", "--scale", "0"},
      {"demo", "--tokens", "-1"},
      {"demo", "--dtype", "int4"},
      {"demo", "--no-such-option"},
      {"demo", "--text", "/no/such/file"},
      {"demo", "--text", empty.path()},
      {"demo", "--trace", "/no/such/file"},
      {"demo", "--report", "/no/such/folder/report.json"},
      {"demo", "--spoil-token", "999999999"},
      {},
      {"no-such-command"},
  };
  for (const auto& arguments : all) {
    const CommandEnd end = run_ferry(arguments);
    const std::string shown = ::testing::PrintToString(arguments);
    EXPECT_EQ(end.exit_code, 2) << shown;
    EXPECT_NE(end.standard_error, "") << shown;
    EXPECT_EQ(end.standard_output, "") << shown;
  }
}

TEST(Ferry, SaysItsVersion) {
  const CommandEnd end = run_ferry({"--version"});
  EXPECT_EQ(end.exit_code, 0);
  EXPECT_TRUE(contains(end.standard_output, std::string("ferry ") + FERRY_VERSION)) << end.standard_output;
}

TEST(Ferry, HelpNamesEveryCommand) {
  const CommandEnd end = run_ferry({"--help"});
  EXPECT_EQ(end.exit_code, 0);
  for (const char* command : {"demo", "bench", "tune", "doctor"})
    EXPECT_TRUE(contains(end.standard_output, command)) << command;
}

}  // namespace
}  // namespace ferry::testing
