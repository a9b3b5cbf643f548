#ifndef FERRY_TOOLS_RUN_EXIT_CODE_HPP
#define FERRY_TOOLS_RUN_EXIT_CODE_HPP

#include "ferry/status.hpp"

namespace ferry::tools {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  ///< the run failed, or its result is wrong
inline constexpr int kExitUsage = 2;   ///< the arguments or an input file are wrong; nothing ran

/// One sentence on standard error, of a failed run with the error's code and the rank it is about; the exit code that
/// goes with it is returned.
int report_failure(const char* command, const Status& status, int exit_code);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_EXIT_CODE_HPP
