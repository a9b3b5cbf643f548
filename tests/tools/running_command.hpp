#ifndef FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP
#define FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP

/// Runs the `ferry` command as a user does: its own process, arguments, environment, standard streams, exit code.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "launch/child_process.hpp"

namespace ferry::testing {

/// End of a process and its output.
struct CommandEnd {
  int exit_code = -1;  ///< -1: killed by `signal`
  int signal = 0;
  std::string standard_output;
  std::string standard_error;
};

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

using Environment = std::vector<std::pair<std::string, std::string>>;

/// A started command. The destructor kills the command if it still runs.
class RunningCommand {
 public:
  /// Passes on `environment`, and no launcher's variables of the test's own environment.
  explicit RunningCommand(std::vector<std::string> arguments, const Environment& environment = {},
                          const std::string& program = FERRY_COMMAND);
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;
  ~RunningCommand();

  pid_t pid() const { return process_.pid(); }
  /// Blocks until `text` is written to standard error; returns false if the command ends before.
  bool wait_for_error_text(const std::string& text);
  /// Processes that the command has forked and that still run.
  std::vector<pid_t> children() const;
  CommandEnd wait();

 private:
  launch::ChildProcess start(std::vector<std::string> argv, const Environment& environment) const;

  int output_fd_;                 ///< a memory file, so that the command never waits for a reader
  launch::ChildProcess process_;  ///< its report is standard error
};

/// Starts the command and waits for its end.
CommandEnd run_ferry(std::vector<std::string> arguments, const Environment& environment = {});

/// Runs a script with bash, where "$FERRY" is the command, for limits, redirections and pipes. Bash has more
/// redirections than sh.
CommandEnd run_script(const std::string& script);

/// Returns true once the process has ended, false if it still runs after `timeout_ms`.
bool wait_until_gone(pid_t pid, int timeout_ms);

/// A new folder, removed with this object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A temporary file, removed with this object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content = "");
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile();
  const std::string& path() const { return path_; }
  std::string read() const;

 private:
  std::string path_;
};

}  // namespace ferry::testing

#endif  // FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP
