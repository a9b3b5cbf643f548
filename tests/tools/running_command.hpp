#ifndef FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP
#define FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP

/// Runs the `ferry` command as a user does: its own process, arguments, environment, standard streams, exit code.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "launch/child_process.hpp"

namespace ferry::testing {

/// How a process ended and what it printed.
struct CommandEnd {
  int exit_code = -1;  ///< -1: killed by `signal`
  int signal = 0;
  std::string standard_output;
  std::string standard_error;
};

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

using Environment = std::vector<std::pair<std::string, std::string>>;

/// A started command. The destructor kills what is still running.
class RunningCommand {
 public:
  /// Launchers' variables in the test's own environment are not passed on; `environment` is added.
  explicit RunningCommand(std::vector<std::string> arguments, const Environment& environment = {},
                          const std::string& program = FERRY_COMMAND);
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;
  ~RunningCommand();

  pid_t pid() const { return process_.pid(); }
  /// Blocks until `text` was written to standard error; false if the command ended without.
  bool wait_for_error_text(const std::string& text);
  /// Processes that the command has forked and that still run.
  std::vector<pid_t> children() const;
  CommandEnd wait();

 private:
  launch::ChildProcess start(std::vector<std::string> argv, const Environment& environment) const;

  int output_fd_;                 ///< a memory file, so that the command never waits for it to be read
  launch::ChildProcess process_;  ///< its report: standard error
};

/// Start and wait.
CommandEnd run_ferry(std::vector<std::string> arguments, const Environment& environment = {});

/// Runs a script with the shell, where "$FERRY" is the command: for limits, redirections and pipes. Bash, whose
/// redirections are the richest.
CommandEnd run_script(const std::string& script);

/// True once the process has ended, false if it still runs after `timeout_ms`.
bool wait_until_gone(pid_t pid, int timeout_ms);

/// A new folder, gone with this object.
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

/// A file in a folder that only this object's test uses, gone with it.
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
