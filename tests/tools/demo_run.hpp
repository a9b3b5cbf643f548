#ifndef FERRY_TESTS_TOOLS_DEMO_RUN_HPP
#define FERRY_TESTS_TOOLS_DEMO_RUN_HPP

/// Shared code of the tests of `ferry demo`.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::testing {

inline constexpr int kDemoRanks = 4;

/// A demo of kDemoRanks CPU ranks, small enough for sanitizer builds.
inline std::vector<std::string> demo_arguments(std::int64_t num_tokens, const std::vector<std::string>& more) {
  std::vector<std::string> arguments = {
      "demo",    "--backend", "cpu", "--ranks", std::to_string(kDemoRanks), "--tokens", std::to_string(num_tokens),
      "--scale", "64"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Sum of a report's number over ranks.
inline std::int64_t sum_over_ranks(const nlohmann::json& report, const char* key) {
  std::int64_t sum = 0;
  for (const nlohmann::json& rank : report["per_rank"]) sum += rank[key].get<std::int64_t>();
  return sum;
}

/// Expects the load of a report to match its ranks, and wait times between pairs of ranks.
inline void expect_load(const nlohmann::json& report) {
  const nlohmann::json& load = report["load"];
  const auto rows = load["rows_per_rank"].get<std::vector<std::int64_t>>();
  ASSERT_EQ(rows.size(), report["per_rank"].size());
  std::int64_t busiest = 0;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    EXPECT_EQ(rows[rank], report["per_rank"][rank]["received_rows"].get<std::int64_t>());
    busiest = std::max(busiest, rows[rank]);
  }
  const double mean = static_cast<double>(sum_over_ranks(report, "received_rows")) / static_cast<double>(rows.size());
  EXPECT_NEAR(load["max_over_mean"].get<double>(), static_cast<double>(busiest) / mean, 1e-9);
  const auto waits = load["wait_times_ns"].get<std::vector<std::vector<std::int64_t>>>();
  ASSERT_EQ(waits.size(), rows.size());
  std::int64_t total_ns = 0;
  for (std::size_t rank = 0; rank < waits.size(); ++rank) {
    ASSERT_EQ(waits[rank].size(), rows.size());
    EXPECT_EQ(waits[rank][rank], 0) << "rank " << rank << " waits for itself";
    for (const std::int64_t time_ns : waits[rank]) total_ns += time_ns;
  }
  EXPECT_GT(total_ns, 0) << "no rank has ever slept in a call";
}

/// Seven experts, which four ranks do not divide, an id of -1, and an expert that no token chose.
inline constexpr const char* kTrace =
    R"({"type": "meta", "model": "some model", "num_experts": 7, "topk": 2}
{"topk_ids": [0, 6], "topk_weights": [0.75, 0.25]}
{"topk_ids": [6, -1], "topk_weights": [1.0, 0.0]}
{"topk_ids": [3, 4], "topk_weights": [0.5, 0.5]}
{"topk_ids": [5, 0], "topk_weights": [0.9, 0.1]}
{"topk_ids": [6, 1], "topk_weights": [0.6, 0.4]}
)";
inline constexpr std::array<int, 7> kTraceRowsPerExpert = {2, 1, 0, 1, 1, 1, 3};

}  // namespace ferry::testing

#endif  // FERRY_TESTS_TOOLS_DEMO_RUN_HPP
