#ifndef FERRY_TOOLS_REPORT_PROGRESS_HPP
#define FERRY_TOOLS_REPORT_PROGRESS_HPP

#include <string>
#include <string_view>

namespace ferry::tools {

/// Reports the progress of a long command on standard error: one line that is rewritten on a terminal, short plain
/// lines elsewhere. Each rank process has its own; only the `enabled` one prints.
class Progress {
 public:
  Progress(std::string command, bool enabled);
  void step(std::string_view what);
  /// Clears the line on a terminal, so that the next output has its own line.
  void clear();

 private:
  std::string command_;
  bool enabled_;
  bool on_terminal_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_REPORT_PROGRESS_HPP
