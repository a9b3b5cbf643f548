#include "run/exit_code.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <string>

namespace ferry::tools {

int report_failure(const char* command, const Status& status, int exit_code) {
  std::fflush(stdout);
  std::string kind;
  if (exit_code == kExitFailed) {
    kind = fmt::format(" ({}{})", to_string(status.code()),
                       status.peer() < 0 ? "" : fmt::format(", rank {}", status.peer()));
  }
  fmt::print(stderr, "ferry {}: {}{}\n", command, status.message(), kind);
  return exit_code;
}

}  // namespace ferry::tools
