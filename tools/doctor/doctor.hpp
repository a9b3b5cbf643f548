#ifndef FERRY_TOOLS_DOCTOR_DOCTOR_HPP
#define FERRY_TOOLS_DOCTOR_DOCTOR_HPP

#include <CLI/App.hpp>

namespace ferry::tools {

/// Adds `ferry doctor`. If it is chosen, its exit code is stored in `exit_code`.
void add_doctor_command(CLI::App& app, int* exit_code);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DOCTOR_DOCTOR_HPP
