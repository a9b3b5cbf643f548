#ifndef FERRY_TOOLS_DEMO_LOAD_REPORT_HPP
#define FERRY_TOOLS_DEMO_LOAD_REPORT_HPP

/// Balance of the ranks' load, and their waits for each other.

#include <cstdint>
#include <string>
#include <vector>

#include "demo/demo_run.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Load of the busiest rank relative to the mean; 1 without load.
double max_over_mean(const std::vector<std::int64_t>& loads);

struct RankLoads {
  std::vector<std::int64_t> rows;                   ///< [R] rows that each rank's experts processed
  std::vector<std::vector<std::int64_t>> waits_ns;  ///< [R][R] time for which rank i has waited for rank j
};

std::string to_text(const DemoPlan& plan, const RankLoads& loads);
Json to_json(const RankLoads& loads);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_LOAD_REPORT_HPP
