#ifndef FERRY_TOOLS_LAUNCH_CHILD_PROCESS_HPP
#define FERRY_TOOLS_LAUNCH_CHILD_PROCESS_HPP

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "ferry/status.hpp"

namespace ferry::launch {

/// End of a process.
struct ProcessEnd {
  int exit_code = 0;  ///< 0 if a signal killed it
  int signal = 0;     ///< 0 if it exited
  bool clean() const { return exit_code == 0 && signal == 0; }
};

/// Child's end of the pipe through which it reports to its parent.
class ReportPipe {
 public:
  explicit ReportPipe(int fd) : fd_(fd) {}
  /// False if the text could not be sent in full.
  bool send(std::string_view text) const;
  int fd() const { return fd_; }

 private:
  int fd_;
};

/// Forked process that runs one function, and its report. Neither survives its owner: the destructor kills and reaps
/// the child, and the system kills it when the parent's thread that forked it ends.
class ChildProcess {
 public:
  /// Function that the child runs; returns its exit code. An exception ends the child with kExitException.
  using Body = std::function<int(const ReportPipe&)>;
  static constexpr int kExitException = 125;

  /// Call it while this process has one thread: fork copies no other thread, but all locks that others hold.
  /// @errors kSystem
  static Result<ChildProcess> start(const Body& body);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess() { kill(); }

  /// -1 once the child has been reaped.
  pid_t pid() const { return pid_; }
  void send_signal(int signal) const;

  /// Parent's end of the pipe; -1 once the report was read to its end.
  int report_fd() const { return report_fd_; }
  /// Part of the report that was read so far.
  const std::string& report() const { return report_; }
  /// Waits for more of the report and reads it. False at its end.
  bool read_report();
  /// Reads what has arrived, without waiting.
  void drain_report();

  /// Reads the report to its end, then reaps the child.
  ProcessEnd wait();
  /// Reaps the child if it has ended, after reading the rest of its report.
  std::optional<ProcessEnd> poll_end();
  /// Kills and reaps the child if it has not been reaped.
  ProcessEnd kill();

 private:
  ChildProcess() = default;
  ProcessEnd reap();
  void close_report();

  pid_t pid_ = -1;
  int report_fd_ = -1;
  std::string report_;
  ProcessEnd end_;
};

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_CHILD_PROCESS_HPP
