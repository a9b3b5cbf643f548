#ifndef FERRY_TOOLS_BENCH_GPU_REPORT_HPP
#define FERRY_TOOLS_BENCH_GPU_REPORT_HPP

/// What a report has for CUDA groups only.

#include <string>
#include <string_view>
#include <vector>

#include "bench/report.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

std::string_view name_of(LimitMethod method);
/// How times and the limit come about, for people.
std::string gpu_formulas();
/// The GPUs, and a table of raw exchanges by method and number of multiprocessors; the best is marked.
std::string limits_to_text(const std::vector<BenchReport>& reports);
/// GPU, driver, kernel options.
void add_gpu_run(const BenchReport& report, Json* json);
/// Host time and raw exchanges of one operation.
void add_gpu_result(const OpResult& result, Json* json);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_GPU_REPORT_HPP
