#ifndef FERRY_TOOLS_BENCH_BENCH_HPP
#define FERRY_TOOLS_BENCH_BENCH_HPP

#include <CLI/App.hpp>

namespace ferry::tools {

/// Adds `ferry bench`. If it is chosen, its exit code is stored in `exit_code`.
void add_bench_command(CLI::App& app, int* exit_code);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_HPP
