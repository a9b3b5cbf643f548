#ifndef FERRY_TOOLS_BENCH_REPORT_HPP
#define FERRY_TOOLS_BENCH_REPORT_HPP

#include <string>
#include <vector>

#include "bench/bench_plan.hpp"
#include "bench/bench_result.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Results for one shape.
struct BenchReport {
  BenchPlan plan;
  std::vector<OpResult> results;
  DeviceReport device;  ///< from rank 0; empty on a CPU group
  WireNames wire;       ///< from rank 0; empty on one node
};

/// Explains how bytes, rates and the limit are computed.
std::string formulas(const BenchPlan& plan);
/// One line per operation and shape.
std::string to_text(const std::vector<BenchReport>& reports);
Json to_json(const std::vector<BenchReport>& reports, const std::string& launch);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_REPORT_HPP
