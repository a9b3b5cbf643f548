#ifndef FERRY_TOOLS_BENCH_LATENCY_OPTIONS_HPP
#define FERRY_TOOLS_BENCH_LATENCY_OPTIONS_HPP

#include <CLI/App.hpp>

#include "bench/bench_plan.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

/// --quantize, --order, --split, --mask-lost-ranks.
void add_latency_options(CLI::App& command, BenchPlan* plan);

/// Checks that the given options suit the operation; sets the layout of latency mode. Call it when `command` is parsed.
/// @errors kInvalidArgument naming the option
Status settle_latency_options(const CLI::App& command, BenchPlan* plan);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_LATENCY_OPTIONS_HPP
