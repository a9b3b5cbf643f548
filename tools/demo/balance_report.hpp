#ifndef FERRY_TOOLS_DEMO_BALANCE_REPORT_HPP
#define FERRY_TOOLS_DEMO_BALANCE_REPORT_HPP

/// Effect of moving experts: the load of ranks and the bytes between nodes, before and after.

#include <cstdint>
#include <string>
#include <vector>

#include "demo/demo_run.hpp"
#include "demo/moe_layer.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Figures of the layer over one half of the tokens.
struct HalfLoad {
  std::vector<std::int64_t> rows;  ///< [R] rows that each rank's experts processed
  std::int64_t wire_bytes = 0;     ///< measured; 0 for the hypothetical half
  std::int64_t formula_bytes = 0;  ///< between nodes, by the ids
  double max_over_mean() const;
};

struct BalanceReport {
  HalfLoad first;   ///< first half, experts in order
  HalfLoad stayed;  ///< second half, if no expert had moved
  HalfLoad moved;   ///< second half
  MoveFigures moves{};
  std::int64_t bytes_per_expert = 0;
  std::vector<std::int32_t> placement;  ///< [P]
};

/// `choice`: the choice of all tokens.
BalanceReport compare_halves(const DemoPlan& plan, const std::vector<RankFigures>& ranks, const Choice& choice);

std::string to_text(const DemoPlan& plan, const BalanceReport& report);
Json to_json(const BalanceReport& report);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_BALANCE_REPORT_HPP
