/// `ferry bench --op latency-…` as a user sees it. No timing is judged.

#include <gtest/gtest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/running_command.hpp"

namespace ferry::testing {
namespace {

using nlohmann::json;

std::vector<std::string> small_bench(std::vector<std::string> more, const char* topk = "2") {
  std::vector<std::string> arguments = {"bench", "--backend",    "cpu", "--ranks",  "4",  "--tokens",
                                        "16",    "--hidden",     "256", "--topk",   topk, "--experts",
                                        "8",     "--iterations", "2",   "--warmup", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// "results" of a run that must succeed.
json results_of(std::vector<std::string> more, const char* topk = "2") {
  const TemporaryFile file;
  more.insert(more.end(), {"--json", file.path()});
  const CommandEnd end = run_ferry(small_bench(more, topk));
  EXPECT_EQ(end.exit_code, 0) << ::testing::PrintToString(more) << end.standard_output << end.standard_error;
  if (end.exit_code != 0) return json::array();
  return json::parse(file.read())["results"];
}

std::vector<std::string> ops_of(const json& results) {
  std::vector<std::string> ops;
  for (const json& result : results) ops.push_back(result["op"]);
  return ops;
}

TEST(LatencyBench, EachOperationHasTheCallsThatItIsComparedWith) {
  EXPECT_EQ(ops_of(results_of({"--op", "latency-dispatch"})),
            (std::vector<std::string>{"latency-dispatch", "route+dispatch"}));
  EXPECT_EQ(ops_of(results_of({"--op", "latency-combine"})), (std::vector<std::string>{"latency-combine", "combine"}));
  EXPECT_EQ(
      ops_of(results_of({"--op", "latency-pair"})),
      (std::vector<std::string>{"latency-dispatch", "latency-combine", "latency-pair", "route+dispatch+combine"}));
}

TEST(LatencyBench, PairSaysHowItComparesWithTheOtherCalls) {
  const json results = results_of({"--op", "latency-pair"});
  ASSERT_EQ(results.size(), 4U);
  const json& pair = results[2];
  const json& reference = results[3];
  EXPECT_EQ(pair["reference_time_us_p50"], reference["time_us_p50"]);
  const double ratio = pair["time_us_p50"].get<double>() / reference["time_us_p50"].get<double>();
  EXPECT_NEAR(pair["ratio_to_reference"].get<double>(), ratio, 1e-9);
  EXPECT_GT(pair["limit_gbps"].get<double>(), 0.0);
  EXPECT_GE(pair["time_us_p99"].get<double>(), pair["time_us_p50"].get<double>());
  for (const json& result : results) {
    EXPECT_EQ(result["quantize"], "none");
    EXPECT_EQ(result["order"], "exact");
    EXPECT_EQ(result["split"], false);
    EXPECT_TRUE(result["send_time_us_p50"].is_null());
    EXPECT_TRUE(result["network"].is_null());
  }
  for (const std::size_t other : {0U, 1U, 3U}) EXPECT_TRUE(results[other]["ratio_to_reference"].is_null());
}

TEST(LatencyBench, BytesFollowTheFormula) {
  // All 16 tokens of each of 4 ranks go to experts 0 and 1, both on rank 0: two rows a token; 48 tokens cross, once
  // each. Combine's rows return one by one, or as one sum per token.
  const auto pair = [](const char* order) {
    return results_of({"--op", "latency-pair", "--routing", "one-hot", "--quantize", "fp8", "--order", order});
  };
  constexpr std::int64_t kDispatchRow = 256 + 2 * 4;  // a byte per channel and two scales
  constexpr std::int64_t kCombineRow = 512;
  const json exact = pair("exact");
  ASSERT_EQ(exact.size(), 4U);
  EXPECT_EQ(exact[0]["logical_bytes"], 128 * kDispatchRow);
  EXPECT_EQ(exact[0]["wire_bytes"], 48 * kDispatchRow);
  EXPECT_EQ(exact[0]["busiest_rank_bytes"], 48 * kDispatchRow);
  EXPECT_EQ(exact[1]["logical_bytes"], 128 * kCombineRow);
  EXPECT_EQ(exact[1]["wire_bytes"], 96 * kCombineRow);
  EXPECT_EQ(exact[2]["wire_bytes"], 48 * kDispatchRow + 96 * kCombineRow);
  EXPECT_EQ(exact[3]["wire_bytes"], 96 * (kDispatchRow + kCombineRow));
  const json sums = pair("rank_sums");
  ASSERT_EQ(sums.size(), 4U);
  EXPECT_EQ(sums[1]["logical_bytes"], 128 * kCombineRow);
  EXPECT_EQ(sums[1]["wire_bytes"], 48 * kCombineRow);
}

TEST(LatencyBench, SumsOfRanksTravelAsFp8OnRequest) {
  // With so many experts of a token, a rank's sum has several rows; bench compares the sums bit for bit.
  constexpr const char* kTopk = "6";
  for (const char* nodes : {"1", "2"}) {
    const json results = results_of({"--op", "latency-pair", "--nodes", nodes, "--order", "rank_sums", "--combine-wire",
                                     "fp8", "--split", "--late-weights"},
                                    kTopk);
    ASSERT_EQ(results.size(), 4U);
    EXPECT_EQ(results[0]["dtype"], "bf16");
    EXPECT_EQ(results[1]["dtype"], "fp8");
    EXPECT_EQ(results[1]["combine_wire"], "fp8");
    EXPECT_EQ(results[1]["logical_bytes"].get<std::int64_t>() % 512, 0);
  }
  const json results =
      results_of({"--op", "latency-combine", "--order", "rank_sums", "--combine-wire", "fp8", "--routing", "one-hot"});
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(results[0]["wire_bytes"], 48 * 512) << "one sum for each token of another rank, of rows as given";
  EXPECT_EQ(results[1]["dtype"], "bf16") << "the reference combines rows as given";
  EXPECT_EQ(results[1]["wire_bytes"], 96 * 512);
  EXPECT_EQ(results_of({"--op", "latency-combine"})[0]["combine_wire"], "as-given");
}

TEST(LatencyBench, SplitCallsSayHowLongTheSendHalfTakes) {
  const json results = results_of({"--op", "latency-pair", "--split"});
  ASSERT_EQ(results.size(), 4U);
  for (const std::size_t half : {0U, 1U}) {
    EXPECT_EQ(results[half]["split"], true);
    EXPECT_GE(results[half]["send_time_us_p50"].get<double>(), 0.0);
    EXPECT_LE(results[half]["send_time_us_p50"].get<double>(), results[half]["time_us_p99"].get<double>());
  }
}

TEST(LatencyBench, WeightsMayBeGivenToTheCombine) {
  for (const char* calls : {"--late-weights", "--split"}) {
    const json results = results_of({"--op", "latency-pair", "--order", "rank_sums", "--late-weights", calls});
    ASSERT_EQ(results.size(), 4U);
    for (const json& result : results) EXPECT_EQ(result["late_weights"], true);
  }
}

TEST(LatencyBench, GroupsThatMaskLostRanksHaveTheSameResults) {
  const json results = results_of({"--op", "latency-pair", "--mask-lost-ranks"});
  ASSERT_EQ(results.size(), 4U);
  EXPECT_EQ(results[0]["mask_lost_ranks"], true);
}

TEST(LatencyBench, EveryQuantisationAndOrderIsRightOnOneNodeAndOnSeveral) {
  // With so many experts of a token on one rank the two orders round to different sums, and bench compares each with
  // its own reference.
  constexpr const char* kTopk = "6";
  for (const char* nodes : {"1", "2"}) {
    for (const char* quantize : {"none", "fp8", "fp8-pow2", "fp8-ue8m0", "int8"}) {
      const bool sums = std::string(quantize) == "fp8" || std::string(quantize) == "none";
      const json results = results_of(
          {"--op", "latency-pair", "--nodes", nodes, "--quantize", quantize, "--order", sums ? "rank_sums" : "exact"},
          kTopk);
      ASSERT_EQ(results.size(), 4U);
      EXPECT_EQ(results[0]["quantize"], quantize);
      EXPECT_EQ(results[1]["network"].is_null(), std::string(nodes) == "1");
      EXPECT_TRUE(results[3]["network"].is_null());
    }
  }
  EXPECT_EQ(results_of({"--op", "latency-pair", "--dtype", "fp8", "--memory", "plain"}).size(), 4U);
}

TEST(LatencyBench, SumsPerRankAreRightInLongRowsToo) {
  // 2000 bytes: several of the pieces in which rows are summed, the last one shorter.
  const CommandEnd end = run_ferry({"bench",     "--backend", "cpu",          "--op",   "latency-combine",
                                    "--order",   "rank_sums", "--ranks",      "4",      "--tokens",
                                    "8",         "--hidden",  "1000",         "--topk", "7",
                                    "--experts", "16",        "--iterations", "1",      "--warmup",
                                    "0"});
  EXPECT_EQ(end.exit_code, 0) << end.standard_error;
}

TEST(LatencyBench, RefusesWhatDoesNotGoTogether) {
  struct Refusal {
    std::vector<std::string> arguments;
    const char* message;
  };
  const std::vector<Refusal> all = {
      {{"--op", "pair", "--quantize", "fp8"}, "--quantize with --op pair: only calls of latency mode"},
      {{"--op", "dispatch", "--split"}, "--split with --op dispatch"},
      {{"--op", "latency-dispatch", "--late-weights"}, "--late-weights with --op latency-dispatch"},
      {{"--op", "dispatch", "--mask-lost-ranks"}, "--mask-lost-ranks with --op dispatch"},
      {{"--op", "combine", "--order", "rank_sums"}, "--order with --op combine"},
      {{"--op", "latency-pair", "--layout", "tokens"}, "latency mode receives in a slab"},
      {{"--op", "latency-pair", "--no-cached"}, "each call routes"},
      {{"--op", "latency-combine", "--quantize", "fp8"}, "nothing is dispatched"},
      {{"--op", "latency-dispatch", "--order", "exact"}, "nothing is combined"},
      {{"--op", "latency-pair", "--dtype", "fp8", "--quantize", "int8"}, "are quantised already"},
      {{"--op", "latency-pair", "--combine-wire", "fp8"}, "--order rank_sums"},
      {{"--op", "latency-dispatch", "--combine-wire", "fp8"}, "--op latency-combine or latency-pair"},
      {{"--op", "latency-pair", "--order", "any"}, "any not in {exact,rank_sums}"},
      {{"--op", "route+dispatch"}, "route+dispatch not in"},
  };
  for (const Refusal& refusal : all) {
    const CommandEnd end = run_ferry(small_bench(refusal.arguments));
    EXPECT_EQ(end.exit_code, 2) << ::testing::PrintToString(refusal.arguments);
    EXPECT_NE(end.standard_error.find(refusal.message), std::string::npos) << end.standard_error;
    EXPECT_EQ(end.standard_output, "");
  }
}

}  // namespace
}  // namespace ferry::testing
