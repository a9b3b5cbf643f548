#include "common/exit_code.hpp"

#include <fmt/format.h>

#include <cstdio>

namespace ferry::tools {

int report_failure(const char* command, const Status& status, int exit_code) {
  std::fflush(stdout);
  fmt::print(stderr, "ferry {}: {}\n", command, status.message());
  return exit_code;
}

}  // namespace ferry::tools
