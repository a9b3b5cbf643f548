#ifndef FERRY_TOOLS_BENCH_KERNEL_SETTINGS_HPP
#define FERRY_TOOLS_BENCH_KERNEL_SETTINGS_HPP

/// Kernel options of the commands bench and tune.

#include <CLI/App.hpp>
#include <string>

#include "ferry/exchange.hpp"
#include "report/json_report.hpp"

namespace ferry::tools {

/// --num-sms, --num-copy-sms, --chunk-tokens, --copy-path.
void add_kernel_options(CLI::App& command, KernelOptions* kernel);
/// "num_sms 8, num_copy_sms default, …".
std::string describe(const KernelOptions& kernel);
Json to_json(const KernelOptions& kernel);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_KERNEL_SETTINGS_HPP
