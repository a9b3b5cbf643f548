#ifndef FERRY_TOOLS_DEMO_LOAD_REPORT_HPP
#define FERRY_TOOLS_DEMO_LOAD_REPORT_HPP

/// How evenly the ranks are loaded, and how long they have waited for each other.

#include <cstdint>
#include <string>
#include <vector>

#include "demo/demo_run.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Of the busiest; 1 where there is no load.
double max_over_mean(const std::vector<std::int64_t>& loads);

struct RankLoads {
  std::vector<std::int64_t> rows;                   ///< [R] that each rank's experts worked on
  std::vector<std::vector<std::int64_t>> waits_ns;  ///< [R][R] for which rank i has waited for rank j
};

std::string to_text(const DemoPlan& plan, const RankLoads& loads);
Json to_json(const RankLoads& loads);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_LOAD_REPORT_HPP
