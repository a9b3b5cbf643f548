#ifndef FERRY_TOOLS_BENCH_BENCH_RANK_HPP
#define FERRY_TOOLS_BENCH_BENCH_RANK_HPP

#include "bench/bench_plan.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Runs the measurement on one rank: sets up, checks the data once, then times the operation and its limit in turn.
Status run_bench_rank(const BenchPlan& plan, RankContext& context);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_RANK_HPP
