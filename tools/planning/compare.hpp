#ifndef FERRY_TOOLS_PLANNING_COMPARE_HPP
#define FERRY_TOOLS_PLANNING_COMPARE_HPP

/// Predictions beside what runs measured.

#include <string>
#include <vector>

#include "planning/model.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// A figure of a run and its prediction: of time in microseconds, or of bytes that a rank sent over the network.
struct PlanComparison {
  std::string call;  ///< with the shape, as the report names it
  std::string unit;  ///< "us" or "bytes"
  double measured = 0;
  double predicted = 0;

  double ratio() const { return predicted / measured; }
};

/// Compares every figure that the model predicts in a report of `ferry bench` (backend cuda: times; any backend with
/// several nodes: bytes) or of benchmarks/nodes.py, whose networks' own rates replace that of `rates`. Others are left
/// out: layouts other than tokens, split and late calls.
std::vector<PlanComparison> compare(const Json& report, const Rates& rates);

/// Built-in rates of the GPU that a report names; empty if there are none.
std::string rates_for(const Json& report);

/// Reads a report.
/// @errors kInvalidArgument: no such report; kSystem: cannot be read
Result<Json> read_report(const std::string& path);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_COMPARE_HPP
