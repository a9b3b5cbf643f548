#ifndef FERRY_TOOLS_BENCH_GPU_REPORT_HPP
#define FERRY_TOOLS_BENCH_GPU_REPORT_HPP

/// Parts of a report that only CUDA groups have.

#include <string>
#include <string_view>
#include <vector>

#include "bench/report.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

std::string_view name_of(LimitMethod method);
/// Explains how times and the limit are computed.
std::string gpu_formulas();
/// Describes the GPUs, with a table of raw exchanges by method and number of multiprocessors; the best is marked.
std::string limits_to_text(const std::vector<BenchReport>& reports);
/// Adds GPU, driver and kernel options.
void add_gpu_run(const BenchReport& report, Json* json);
/// Adds host time and raw exchanges of one operation.
void add_gpu_result(const OpResult& result, Json* json);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_GPU_REPORT_HPP
