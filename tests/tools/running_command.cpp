#include "tools/running_command.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace ferry::testing {

namespace {

constexpr const char* kLauncherVariables[] = {
    "FERRY_RANK", "FERRY_NUM_RANKS", "FERRY_HOST",           "FERRY_PORT",           "FERRY_SECRET",
    "RANK",       "WORLD_SIZE",      "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
    "PMI_SIZE",   "SLURM_PROCID",    "SLURM_NTASKS"};

std::string read_all(int fd) {
  std::string text;
  std::array<char, 4096> part{};
  lseek(fd, 0, SEEK_SET);
  for (ssize_t num_bytes = 0; (num_bytes = read(fd, part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(num_bytes));
  }
  return text;
}

}  // namespace

RunningCommand::RunningCommand(std::vector<std::string> arguments, const Environment& environment) {
  arguments.insert(arguments.begin(), FERRY_COMMAND);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  output_fd_ = memfd_create("stdout", MFD_CLOEXEC);
  std::array<int, 2> error_pipe{};
  if (output_fd_ < 0 || pipe2(error_pipe.data(), O_CLOEXEC) != 0) std::abort();
  pid_ = fork();
  if (pid_ == 0) {
    for (const char* name : kLauncherVariables) unsetenv(name);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    dup2(output_fd_, STDOUT_FILENO);
    dup2(error_pipe[1], STDERR_FILENO);
    execv(argv.front(), argv.data());
    _exit(127);
  }
  close(error_pipe[1]);
  error_fd_ = error_pipe[0];
}

RunningCommand::~RunningCommand() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(output_fd_);
  close(error_fd_);
}

bool RunningCommand::read_error_once() {
  std::array<char, 4096> part{};
  const ssize_t num_bytes = read(error_fd_, part.data(), part.size());
  if (num_bytes > 0) error_.append(part.data(), static_cast<std::size_t>(num_bytes));
  return num_bytes > 0;
}

bool RunningCommand::wait_for_error_text(const std::string& text) {
  while (error_.find(text) == std::string::npos) {
    if (!read_error_once()) return false;
  }
  return true;
}

std::vector<pid_t> RunningCommand::children() const {
  const std::string id = std::to_string(pid_);
  std::ifstream file("/proc/" + id + "/task/" + id + "/children");
  return {std::istream_iterator<pid_t>(file), std::istream_iterator<pid_t>()};
}

CommandEnd RunningCommand::wait() {
  while (read_error_once()) {
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  CommandEnd end;
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  end.standard_output = read_all(output_fd_);
  end.standard_error = error_;
  return end;
}

CommandEnd run_ferry(std::vector<std::string> arguments, const Environment& environment) {
  return RunningCommand(std::move(arguments), environment).wait();
}

bool wait_until_gone(pid_t pid, int timeout_ms) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0U));
  if (fd < 0) return errno == ESRCH;
  pollfd process{fd, POLLIN, 0};
  const int num_ready = poll(&process, 1, timeout_ms);
  close(fd);
  return num_ready == 1;
}

TemporaryFile::TemporaryFile(const std::string& content) {
  const char* folder = std::getenv("TMPDIR");
  path_ = std::string(folder != nullptr ? folder : "/tmp") + "/ferry-tools-XXXXXX";
  const int fd = mkstemp(path_.data());
  if (fd < 0 || write(fd, content.data(), content.size()) != static_cast<ssize_t>(content.size())) std::abort();
  close(fd);
}

TemporaryFile::~TemporaryFile() { unlink(path_.c_str()); }

std::string TemporaryFile::read() const {
  std::ifstream file(path_);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace ferry::testing
