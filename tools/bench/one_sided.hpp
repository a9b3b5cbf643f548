#ifndef FERRY_TOOLS_BENCH_ONE_SIDED_HPP
#define FERRY_TOOLS_BENCH_ONE_SIDED_HPP

/// Times one call of the one-sided layer between the first rank and the last, with the other ranks waiting, and for
/// comparison plain loads, stores and atomics if both are on one node.

#include <cstdint>
#include <string>
#include <vector>

#include "bench/bench_plan.hpp"
#include "run/launcher.hpp"
#include "run/run_options.hpp"

namespace ferry::tools {

struct OneSidedRun {
  BenchOp op = BenchOp::kPut;
  CommonOptions common{};
  LaunchPlan launch{};
  std::string backend{};
  int num_iterations = 0;
  int num_warmup = 0;
  std::string json_path{};
};

constexpr bool is_one_sided(BenchOp op) { return op >= BenchOp::kPut && op <= BenchOp::kFetchAdd; }

/// Number of ranks if the user gives none.
inline constexpr int kOneSidedRanks = 2;

/// Runs the measurement, prints its report, and returns the exit code.
int run_one_sided_bench(const OneSidedRun& run);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_ONE_SIDED_HPP
