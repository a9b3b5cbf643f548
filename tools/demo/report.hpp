#ifndef FERRY_TOOLS_DEMO_REPORT_HPP
#define FERRY_TOOLS_DEMO_REPORT_HPP

#include <optional>
#include <string>
#include <vector>

#include "demo/balance_report.hpp"
#include "demo/demo_run.hpp"
#include "demo/dense_layer.hpp"
#include "demo/load_report.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// All results of the demonstration.
struct DemoReport {
  const DemoPlan* plan = nullptr;
  std::string launch;  ///< how the ranks were started
  std::vector<RankFigures> ranks;
  std::vector<std::int64_t> expert_rows;                ///< [E] over all ranks
  std::vector<std::vector<std::int64_t>> rows_to_rank;  ///< [R][R] by sending rank, then by receiving rank
  RankLoads loads;
  std::optional<BalanceReport> balance;  ///< if experts moved
  Comparison comparison;
  std::int64_t ranks_ns = 0;  ///< from the first fork to the last rank's end
  std::int64_t dense_ns = 0;
};

/// Network traffic of one call, over all ranks; absent on one node.
WireTotal wire_of(const DemoReport& report, Phase phase);

/// Description of the run, printed before it starts.
std::string introduction(const DemoPlan& plan, const std::string& launch);
/// Table of the ranks, expert load, largest error, verdict.
std::string to_text(const DemoReport& report);
Json to_json(const DemoReport& report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_REPORT_HPP
