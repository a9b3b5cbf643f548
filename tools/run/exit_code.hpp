#ifndef FERRY_TOOLS_RUN_EXIT_CODE_HPP
#define FERRY_TOOLS_RUN_EXIT_CODE_HPP

#include "ferry/status.hpp"

namespace ferry::tools {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  ///< the run failed, its result is wrong, or it could not be written
inline constexpr int kExitUsage = 2;   ///< the arguments, or a file that they name, cannot be used; nothing ran

/// Exit code of a run that ended before its ranks were started, or when they met.
inline int exit_code_of_launch(const Status& status) {
  return status.code() == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailed;
}

/// Prints one sentence about a failed run on standard error, with the error's code and the affected rank; returns the
/// exit code. Names options of the command instead of members of GroupOptions.
int report_failure(const char* command, const Status& status, int exit_code);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_EXIT_CODE_HPP
