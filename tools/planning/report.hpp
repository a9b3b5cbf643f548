#ifndef FERRY_TOOLS_PLANNING_REPORT_HPP
#define FERRY_TOOLS_PLANNING_REPORT_HPP

/// Text and JSON of `ferry plan`.

#include <string>
#include <vector>

#include "planning/model.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// Warnings about what a prediction leaves out, or what groups cannot do; empty if there are none.
std::vector<std::string> notes_on(const PlanShape& shape);

/// One topology: its calls and memory; `with_terms`: and each term of each call.
std::string plan_text(const PlanShape& shape, const Rates& rates, bool with_terms);
Json plan_json(const PlanShape& shape, const Rates& rates);

/// The rates that terms of these shapes use, with their origins.
std::string rates_text(const std::vector<PlanShape>& shapes, const Rates& rates);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_REPORT_HPP
