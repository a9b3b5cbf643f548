#ifndef FERRY_TOOLS_DEMO_DEMO_HPP
#define FERRY_TOOLS_DEMO_DEMO_HPP

#include <CLI/App.hpp>

namespace ferry::tools {

/// Adds `ferry demo`. If it is chosen, its exit code is stored in `exit_code`.
void add_demo_command(CLI::App& app, int* exit_code);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_DEMO_HPP
