/// `ferry bench` as a user sees it: its report, byte counts by formula, refusals. No timing is judged.

#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

std::vector<std::string> small_bench(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"bench", "--backend",    "cpu", "--ranks",  "4", "--tokens",
                                        "16",    "--hidden",     "256", "--topk",   "2", "--experts",
                                        "8",     "--iterations", "3",   "--warmup", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// "results" of a run that must succeed.
json results_of(std::vector<std::string> more) {
  const TemporaryFile file;
  more.insert(more.end(), {"--json", file.path()});
  const CommandEnd end = run_ferry(small_bench(more));
  EXPECT_EQ(end.exit_code, 0) << ::testing::PrintToString(more) << end.standard_output << end.standard_error;
  if (end.exit_code != 0) return json::array();
  return json::parse(file.read())["results"];
}

TEST(Bench, PairReportsBothOperationsAndTheirSum) {
  const json results = results_of({"--op", "pair"});
  ASSERT_EQ(results.size(), 3U);
  EXPECT_EQ(results[0]["op"], "dispatch");
  EXPECT_EQ(results[1]["op"], "combine");
  EXPECT_EQ(results[2]["op"], "pair");
  EXPECT_EQ(results[2]["logical_bytes"].get<std::int64_t>(),
            results[0]["logical_bytes"].get<std::int64_t>() + results[1]["logical_bytes"].get<std::int64_t>());
  const std::set<std::string> expected_keys = {"op",          "backend",       "ranks",          "nodes",
                                               "tokens",      "hidden",        "topk",           "experts",
                                               "dtype",       "replicas",      "routing",        "time_us_p50",
                                               "time_us_p99", "logical_bytes", "wire_bytes",     "logical_gbps",
                                               "wire_gbps",   "limit_gbps",    "ratio_to_limit", "commit",
                                               "host",        "transport",     "network",        "busiest_rank_bytes"};
  for (const json& result : results) {
    std::set<std::string> keys;
    for (const auto& [key, value] : result.items()) keys.insert(key);
    EXPECT_EQ(keys, expected_keys);
    EXPECT_GT(result["time_us_p50"].get<double>(), 0.0);
    EXPECT_GE(result["time_us_p99"].get<double>(), result["time_us_p50"].get<double>());
    EXPECT_GT(result["limit_gbps"].get<double>(), 0.0);
    EXPECT_EQ(result["nodes"], 1);
    EXPECT_TRUE(result["transport"].is_null());
    EXPECT_TRUE(result["network"].is_null());
    const double rate = result["logical_bytes"].get<double>() / 4 / (result["time_us_p50"].get<double>() * 1000.0);
    EXPECT_NEAR(result["logical_gbps"].get<double>(), rate, rate * 1e-9);
    EXPECT_NEAR(result["ratio_to_limit"].get<double>(), rate / result["limit_gbps"].get<double>(), 1e-9);
  }
}

TEST(Bench, BytesOfOneHotRoutingFollowTheFormula) {
  // All 16 tokens of each of 4 ranks go to experts 0 and 1, both on rank 0: one row a token, 48 of 64 from other ranks.
  const json results = results_of({"--routing", "one-hot"});
  ASSERT_EQ(results.size(), 3U);
  constexpr std::int64_t kDispatchRow = 256 * 2 + 2 * (8 + 4);  // payload, two ids and weights
  EXPECT_EQ(results[0]["logical_bytes"], 64 * kDispatchRow);
  EXPECT_EQ(results[0]["wire_bytes"], 48 * kDispatchRow);
  EXPECT_EQ(results[0]["busiest_rank_bytes"], 48 * kDispatchRow) << "rank 0 receives all, others send a third";
  EXPECT_EQ(results[1]["logical_bytes"], 64 * 512);
  EXPECT_EQ(results[1]["wire_bytes"], 48 * 512);
  EXPECT_EQ(results[1]["busiest_rank_bytes"], 48 * 512);
  EXPECT_EQ(results[2]["busiest_rank_bytes"], 48 * (kDispatchRow + 512));
}

TEST(Bench, CombineQuantisesItsRowsOnRequest) {
  for (const char* layout : {"tokens", "experts", "slab"}) {
    const json results = results_of({"--combine-wire", "fp8", "--routing", "one-hot", "--layout", layout});
    ASSERT_EQ(results.size(), 3U);
    const std::int64_t num_rows = layout == std::string("tokens") ? 64 : 128;
    EXPECT_EQ(results[0]["dtype"], "bf16");
    EXPECT_EQ(results[1]["dtype"], "fp8");
    EXPECT_EQ(results[1]["logical_bytes"], num_rows * (256 + 2 * 4)) << layout;
  }
}

TEST(Bench, Fp8RowsAreHalfTheSizeAndCarryScales) {
  const json results = results_of({"--routing", "one-hot", "--dtype", "fp8"});
  ASSERT_EQ(results.size(), 3U);
  EXPECT_EQ(results[0]["dtype"], "fp8");
  EXPECT_EQ(results[0]["logical_bytes"], 64 * (256 + 2 * 4 + 2 * (8 + 4)));
  EXPECT_EQ(results[1]["dtype"], "bf16");
  EXPECT_EQ(results[1]["logical_bytes"], 64 * 512);
}

TEST(Bench, ExpertLayoutsCountARowPerExpert) {
  for (const char* layout : {"experts", "slab"}) {
    const json results = results_of({"--routing", "one-hot", "--layout", layout});
    ASSERT_EQ(results.size(), 3U) << layout;
    EXPECT_EQ(results[0]["logical_bytes"], 128 * (512 + 4)) << layout;
    EXPECT_EQ(results[1]["logical_bytes"], 128 * 512) << layout;
  }
}

TEST(Bench, EveryCombinationOfOptionsRuns) {
  for (const char* op : {"dispatch", "combine", "pair"}) {
    for (const char* memory : {"symmetric", "plain"}) {
      for (const char* routing : {"random", "zipf"}) {
        for (const char* dtype : {"bf16", "fp8"}) {
          const json results = results_of({"--op", op, "--memory", memory, "--routing", routing, "--dtype", dtype});
          EXPECT_EQ(results.size(), std::string(op) == "pair" ? 3U : 1U);
        }
      }
    }
  }
}

TEST(Bench, DispatchCanRouteFirstEachTime) {
  const TemporaryFile file;
  const CommandEnd end = run_ferry(small_bench({"--op", "dispatch", "--no-cached", "--json", file.path()}));
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_NE(end.standard_output.find("rebuilt for each dispatch"), std::string::npos) << end.standard_output;
  const json fresh = json::parse(file.read());
  EXPECT_EQ(fresh["run"]["cached"], false);
  const json cached = results_of({"--op", "dispatch", "--cached"});
  ASSERT_EQ(cached.size(), 1U);
  EXPECT_EQ(fresh["results"][0]["logical_bytes"], cached[0]["logical_bytes"]);
}

TEST(Bench, RouteHasATimeAndNoLimit) {
  const json results = results_of({"--op", "route"});
  ASSERT_EQ(results.size(), 1U);
  EXPECT_GT(results[0]["time_us_p50"].get<double>(), 0.0);
  EXPECT_EQ(results[0]["logical_bytes"], 0);
  EXPECT_TRUE(results[0]["limit_gbps"].is_null());
  EXPECT_TRUE(results[0]["ratio_to_limit"].is_null());
}

/// Bench compares the counts of one call with the ids before it times any call.
TEST(Bench, RoutesCountTheLoad) {
  for (const char* layout : {"tokens", "experts", "slab"}) {
    for (const char* replicas : {"0", "3"}) {
      const TemporaryFile file;
      const CommandEnd end = run_ferry(small_bench(
          {"--op", "route", "--count-load", "--layout", layout, "--replicas", replicas, "--json", file.path()}));
      ASSERT_EQ(end.exit_code, 0) << end.standard_error;
      EXPECT_NE(end.standard_output.find("load counted"), std::string::npos) << end.standard_output;
      EXPECT_EQ(json::parse(file.read())["run"]["counts_load"], true);
    }
  }
  EXPECT_EQ(results_of({"--op", "pair", "--no-cached", "--count-load"}).size(), 3U);
}

TEST(Bench, SaysWhetherItsRowsWereVerified) {
  for (const bool verify : {false, true}) {
    std::vector<std::string> arguments = small_bench({"--json", "-", "--nodes", "2"});
    if (verify) arguments.emplace_back("--verify");
    const CommandEnd end = run_ferry(arguments);
    ASSERT_EQ(end.exit_code, 0) << end.standard_error;
    EXPECT_EQ(json::parse(end.standard_output)["run"]["verify"], verify);
  }
}

TEST(Bench, JsonOnStandardOutputStandsAlone) {
  const CommandEnd end = run_ferry(small_bench({"--op", "dispatch", "--json", "-"}));
  ASSERT_EQ(end.exit_code, 0) << end.standard_error;
  EXPECT_EQ(json::parse(end.standard_output)["results"].size(), 1U);
  EXPECT_NE(end.standard_error.find("ratio"), std::string::npos) << end.standard_error;
}

TEST(Bench, SweepHasOneSetOfResultsPerTokenCount) {
  const json results = results_of({"--op", "dispatch", "--sweep-tokens", "8,16,32", "--routing", "one-hot"});
  ASSERT_EQ(results.size(), 3U);
  const auto bytes = [&](std::size_t i) { return results[i]["logical_bytes"].get<std::int64_t>(); };
  EXPECT_EQ(results[2]["tokens"], 32);
  EXPECT_EQ(bytes(1), 2 * bytes(0));
  EXPECT_EQ(bytes(2), 4 * bytes(0));
}

TEST(Bench, TraceSetsExpertsAndTopk) {
  const TemporaryFile trace(
      "{\"topk_ids\": [6, 0, 3], \"topk_weights\": [0.5, 0.3, 0.2]}\n"
      "{\"topk_ids\": [1, 2, 4], \"topk_weights\": [0.4, 0.3, 0.3]}\n");
  const TemporaryFile file;
  const CommandEnd end = run_ferry({"bench", "--backend", "cpu", "--ranks", "3", "--tokens", "5", "--hidden", "64",
                                    "--iterations", "2", "--routing", "trace:" + trace.path(), "--json", file.path()});
  ASSERT_EQ(end.exit_code, 0) << end.standard_output << end.standard_error;
  const json result = json::parse(file.read())["results"][0];
  EXPECT_EQ(result["experts"], 7);
  EXPECT_EQ(result["topk"], 3);
}

TEST(Bench, RefusesWrongArguments) {
  const std::vector<std::vector<std::string>> all = {
      {"--op", "gather"},
      {"--routing", "uniform"},
      {"--routing", "trace:/no/such/file"},
      {"--hidden", "7"},
      {"--hidden", "8", "--dtype", "fp8"},
      {"--topk", "33"},
      {"--sweep-tokens", "1,,2"},
      {"--sweep-tokens", ",1"},
      {"--sweep-tokens", "1,"},
      {"--sweep-tokens", ""},
      {"--sweep-tokens", "1,x"},
      {"--sweep-tokens", "0"},
      {"--topk", "4", "--experts", "3"},
      {"--iterations", "0"},
      {"--ranks", "0"},
      {"--nodes", "3"},
      {"--memory", "unified"},
      {"--json", "/no/such/folder/x.json"},
      {"--num-sms", "-1"},
      {"--copy-path", "pigeon"},
      {"--op", "dispatch", "--count-load"},
      {"--op", "combine", "--no-cached", "--count-load"},
      {"--op", "latency-pair", "--count-load"},
      {"--combine-wire", "int8"},
      {"--combine-wire", "fp8", "--hidden", "192"},
      {"--combine-wire", "fp8", "--op", "dispatch"},
      {"--combine-wire", "fp8", "--op", "latency-pair"},
      {"--combine-wire", "fp8", "--ranks", "4", "--nodes", "2"},
  };
  for (const auto& more : all) {
    std::vector<std::string> arguments = {"bench"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandEnd end = run_ferry(arguments);
    EXPECT_EQ(end.exit_code, 2) << ::testing::PrintToString(more);
    EXPECT_NE(end.standard_error, "") << ::testing::PrintToString(more);
  }
}

TEST(Bench, KernelOptionsChangeNothingOnTheCpu) {
  const json results = results_of({"--op", "dispatch", "--num-sms", "8", "--num-copy-sms", "2", "--chunk-tokens", "64",
                                   "--copy-path", "load-store"});
  ASSERT_EQ(results.size(), 1U);
  EXPECT_FALSE(results[0].contains("host_time_us_p50"));
  EXPECT_FALSE(results[0].contains("num_sms"));
  EXPECT_FALSE(results[0].contains("kernels"));
}

TEST(Bench, OthersWaitForALateRank) {
  constexpr int kLateUs = 100'000;
  constexpr int kLeastUs = kLateUs / 4;  // ranks leave the barrier one after the other
  const TemporaryFile file;
  for (const char* op : {"pair", "latency-pair"}) {
    const CommandEnd end =
        run_ferry(small_bench({"--op", op, "--late-us", std::to_string(kLateUs), "--json", file.path()}));
    ASSERT_EQ(end.exit_code, 0) << end.standard_error;
    const json report = json::parse(file.read());
    EXPECT_EQ(report["run"]["late_us"], kLateUs);
    for (const json& result : report["results"]) {
      EXPECT_GE(result["time_us_p50"], kLeastUs) << result["op"];
      EXPECT_TRUE(result["limit_gbps"].is_null()) << "copies wait for no rank";
    }
  }
  EXPECT_EQ(run_ferry({"bench", "--backend", "cpu", "--ranks", "1", "--tokens", "8", "--late-us", "1"}).exit_code, 2);
}

TEST(Tune, RefusesCpuRanks) {
  const CommandEnd end = run_ferry({"tune", "--backend", "cpu", "--ranks", "2"});
  EXPECT_EQ(end.exit_code, 2) << end.standard_output;
  EXPECT_EQ(end.standard_output, "");
  EXPECT_NE(end.standard_error.find("needs GPUs and the backend cuda"), std::string::npos) << end.standard_error;
}

TEST(Tune, SaysThatSeveralNodesNeedAnExplicitBackend) {
  const CommandEnd end = run_ferry({"tune", "--nodes", "2", "--ranks", "2"});
  EXPECT_EQ(end.exit_code, 2) << end.standard_output;
  EXPECT_NE(end.standard_error.find("--backend cuda"), std::string::npos) << end.standard_error;
}

TEST(Bench, GivesTheKernelSettingsToItsGroups) {
  const CommandEnd end = run_ferry(small_bench({"--tuning-file", "/no/such/file"}));
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_NE(end.standard_error.find("tuning file /no/such/file"), std::string::npos) << end.standard_error;
  EXPECT_EQ(results_of({"--op", "dispatch", "--tuning-file", "builtin"}).size(), 1U);
}

TEST(Bench, RefusesWhatDoesNotFitTheMachine) {
  const std::vector<std::vector<std::string>> all = {
      {"--tokens", "262144", "--routing", "one-hot", "--hidden", "1048576"},
      {"--tokens", "4194304", "--hidden", "1048576"},  // 8.8 TB for each rank; the ids alone take minutes
      {"--tokens", "4194304", "--hidden", "1048576", "--topk", "32", "--experts", "1024"},
  };
  for (const auto& more : all) {
    std::vector<std::string> arguments = {"bench", "--backend", "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandEnd end = run_ferry(arguments);
    EXPECT_EQ(end.exit_code, 1);
    EXPECT_NE(end.standard_error.find("use fewer"), std::string::npos) << end.standard_error;
  }
}

}  // namespace
}  // namespace ferry::testing
