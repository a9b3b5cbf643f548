#ifndef FERRY_TOOLS_DOCTOR_ATTACH_HPP
#define FERRY_TOOLS_DOCTOR_ATTACH_HPP

#include <cstdint>
#include <string>

namespace ferry::tools {

/// Prints the recorded calls of the groups of process `pid`, and as JSON to `json_path` if that is not empty ("-": only
/// JSON, to standard output). Returns the exit code.
int print_recorded_calls(std::int64_t pid, const std::string& json_path);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DOCTOR_ATTACH_HPP
