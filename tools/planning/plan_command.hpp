#ifndef FERRY_TOOLS_PLANNING_PLAN_COMMAND_HPP
#define FERRY_TOOLS_PLANNING_PLAN_COMMAND_HPP

#include <CLI/App.hpp>

namespace ferry::tools {

/// `ferry plan`: predicts time and memory of calls from a shape, a topology and rates (docs/plan.md).
void add_plan_command(CLI::App& app, int* exit_code);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_PLAN_COMMAND_HPP
