#ifndef FERRY_TOOLS_BENCH_GPU_TIMING_HPP
#define FERRY_TOOLS_BENCH_GPU_TIMING_HPP

#include "bench/bench_plan.hpp"
#include "bench/operations.hpp"
#include "report/progress.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

/// Runs the measurement of one rank of a CUDA group: for each of the plan's kernel options checks the data once and
/// times the operations, then times the raw exchanges that are their limit. Collective.
Status time_on_gpu(const BenchPlan& plan, Operations& operations, RankContext& context, Progress* progress);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_GPU_TIMING_HPP
