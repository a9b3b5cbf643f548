#ifndef FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP
#define FERRY_TESTS_TOOLS_RUNNING_COMMAND_HPP

/// Runs the `ferry` command as a user does: its own process, arguments, environment, standard streams, exit code.

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace ferry::testing {

/// How a process ended and what it said.
struct CommandEnd {
  int exit_code = -1;  ///< -1: killed by `signal`
  int signal = 0;
  std::string standard_output;
  std::string standard_error;
};

using Environment = std::vector<std::pair<std::string, std::string>>;

/// A started command. The destructor kills what is still running.
class RunningCommand {
 public:
  /// Launchers' variables of the test's own surroundings are not passed on; `environment` is added.
  explicit RunningCommand(std::vector<std::string> arguments, const Environment& environment = {});
  RunningCommand(const RunningCommand&) = delete;
  RunningCommand& operator=(const RunningCommand&) = delete;
  ~RunningCommand();

  pid_t pid() const { return pid_; }
  /// Blocks until `text` was written to standard error; false if the command ended without.
  bool wait_for_error_text(const std::string& text);
  /// Processes that the command has forked and that still run.
  std::vector<pid_t> children() const;
  CommandEnd wait();

 private:
  bool read_error_once();

  pid_t pid_ = -1;
  int output_fd_ = -1;  ///< a memory file: the command never waits for us to read it
  int error_fd_ = -1;   ///< a pipe: we wait for what it says
  std::string error_;
};

/// Start and wait.
CommandEnd run_ferry(std::vector<std::string> arguments, const Environment& environment = {});

/// True once the process has ended, false if it still runs after `timeout_ms`.
bool wait_until_gone(pid_t pid, int timeout_ms);

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
