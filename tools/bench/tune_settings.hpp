#ifndef FERRY_TOOLS_BENCH_TUNE_SETTINGS_HPP
#define FERRY_TOOLS_BENCH_TUNE_SETTINGS_HPP

/// Kernel settings that `ferry tune` tries, and what it measured of each.

#include <cstdint>
#include <string>
#include <vector>

#include "bench/bench_plan.hpp"
#include "bench/bench_result.hpp"
#include "bench/tuning_file.hpp"
#include "ferry/exchange.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Numbers that the user gives in place of those that are tried otherwise; empty: none.
struct TriedNumbers {
  std::vector<int> num_sms;
  std::vector<int> chunk_tokens;
};

/// Times of one operation by settings; settings that were not measured are left out.
struct Sweep {
  std::string name;
  BenchOp op = BenchOp::kDispatch;
  bool staged = false;
  std::int64_t row_bytes = 0;   ///< of the payload
  std::int64_t item_bytes = 0;  ///< of a row between nodes
  Layout layout = Layout::kTokens;
  std::int64_t num_tokens = 0;
  int num_nodes = 1;
  int num_ranks = 1;
  std::vector<KernelOptions> kernels;
  std::vector<OpResult> results;

  /// Index of the fastest settings.
  std::size_t best() const;
};

/// Settings for the first measurement, the built-in ones first.
std::vector<KernelOptions> first_settings(const BenchPlan& plan, const TriedNumbers& tried);
/// Settings for the second measurement: the built-in ones, the best of the first, and variants of the best.
std::vector<KernelOptions> second_settings(const std::vector<Sweep>& sweeps, const TriedNumbers& tried);

/// Measurements of `plan`, by operation. Operations without times are left out.
std::vector<Sweep> sweeps_of(const BenchPlan& plan, const RunOutcome& outcome);
/// The best settings for the tuning file.
TunedCall tuned_call(const Sweep& sweep);

std::string to_text(const Sweep& sweep);
std::string gains_to_text(const std::vector<Sweep>& sweeps);
Json sweeps_to_json(const std::vector<Sweep>& sweeps);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_TUNE_SETTINGS_HPP
