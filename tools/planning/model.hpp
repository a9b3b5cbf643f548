#ifndef FERRY_TOOLS_PLANNING_MODEL_HPP
#define FERRY_TOOLS_PLANNING_MODEL_HPP

/// Predicted times of calls: terms of bytes and rates. Terms that the implementation overlaps count by their longest,
/// the others by their sum.

#include <string>
#include <string_view>
#include <vector>

#include "planning/rates.hpp"
#include "planning/shape.hpp"

namespace ferry::tools {

struct Term {
  std::string_view name;
  double us = 0;
  double bytes = 0;       ///< 0 if the term is not one of bytes
  bool overlaps = false;  ///< runs while the other overlapping terms do
  std::vector<Rate Rates::*> rates;
};

struct CallPlan {
  std::string_view call;
  std::vector<Term> terms;
  double network_bytes = 0;  ///< that a rank sends
  double link_bytes = 0;     ///< that a rank sends, or loads, over NVLink

  double time_us() const;
  /// The term that takes the largest part of the time.
  const Term& limit() const;
};

CallPlan plan_route(const PlanShape& shape, const Rates& rates);
CallPlan plan_dispatch(const PlanShape& shape, const Rates& rates);
CallPlan plan_combine(const PlanShape& shape, const Rates& rates);
/// Kernels of latency mode; a pair is one of a captured graph.
CallPlan plan_latency_dispatch(const PlanShape& shape, const Rates& rates);
CallPlan plan_latency_combine(const PlanShape& shape, const Rates& rates);
CallPlan plan_latency_pair(const PlanShape& shape, const Rates& rates);

/// All of the above.
std::vector<CallPlan> plan_calls(const PlanShape& shape, const Rates& rates);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_MODEL_HPP
