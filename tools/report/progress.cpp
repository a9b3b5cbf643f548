#include "report/progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <utility>

#include "report/output.hpp"

namespace ferry::tools {

namespace {
/// ANSI: return to the first column, erase to the end of the line (ECMA-48, CR and EL).
constexpr std::string_view kRewriteLine = "\r\x1b[K";
}  // namespace

Progress::Progress(std::string command, bool enabled)
    : command_(std::move(command)), enabled_(enabled), on_terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::step(std::string_view what) {
  if (!enabled_) return;
  if (on_terminal_) {
    print_error(fmt::format("{}{}: {} …", kRewriteLine, command_, what));
  } else {
    print_error(fmt::format("{}: {}\n", command_, what));
  }
}

void Progress::clear() {
  if (!enabled_ || !on_terminal_) return;
  print_error(kRewriteLine);
}

}  // namespace ferry::tools
