#include "tools/running_command.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

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

/// Returns -1 if there is no such process.
pid_t parent_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  // Unlike iterators of its buffer, the stream does not throw if the process ends between opening and reading.
  std::getline(file, stat, '\0');
  // "pid (name) state parent ...", where the name may contain any character.
  const std::size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos || name_end + 4 > stat.size()) return -1;
  return std::atoi(stat.c_str() + name_end + 4);
}

std::vector<std::string> in_front(const std::string& first, std::vector<std::string> rest) {
  rest.insert(rest.begin(), first);
  return rest;
}

}  // namespace

RunningCommand::RunningCommand(std::vector<std::string> arguments, const Environment& environment,
                               const std::string& program)
    : output_fd_(memfd_create("stdout", MFD_CLOEXEC)),
      process_(start(in_front(program, std::move(arguments)), environment)) {}

RunningCommand::~RunningCommand() { close(output_fd_); }

launch::ChildProcess RunningCommand::start(std::vector<std::string> argv_text, const Environment& environment) const {
  std::vector<char*> argv;
  for (std::string& argument : argv_text) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return launch::ChildProcess::start([&](const launch::ReportPipe& pipe) {
           for (const char* name : kLauncherVariables) unsetenv(name);
           for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
           dup2(output_fd_, STDOUT_FILENO);
           dup2(pipe.fd(), STDERR_FILENO);
           execvp(argv.front(), argv.data());
           return 127;
         })
      .value();
}

bool RunningCommand::wait_for_error_text(const std::string& text) {
  while (process_.report().find(text) == std::string::npos) {
    if (!process_.read_report()) return false;
  }
  return true;
}

/// Searches the parents of all processes: not every kernel has /proc/PID/task/TID/children.
std::vector<pid_t> RunningCommand::children() const {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const pid_t candidate = std::atoi(entry.path().filename().c_str());
    if (candidate > 0 && parent_of(candidate) == pid()) found.push_back(candidate);
  }
  std::sort(found.begin(), found.end());  // in start order, unless process numbers wrap around just then
  return found;
}

CommandEnd RunningCommand::wait() {
  const launch::ProcessEnd process = process_.wait();
  CommandEnd end;
  end.exit_code = process.signal == 0 ? process.exit_code : -1;
  end.signal = process.signal;
  end.standard_output = read_all(output_fd_);
  end.standard_error = process_.report();
  return end;
}

CommandEnd run_ferry(std::vector<std::string> arguments, const Environment& environment) {
  return RunningCommand(std::move(arguments), environment).wait();
}

CommandEnd run_script(const std::string& script) {
  return RunningCommand({"-c", script}, {{"FERRY", FERRY_COMMAND}}, "bash").wait();
}

bool wait_until_gone(pid_t pid, int timeout_ms) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0U));
  if (fd < 0) return errno == ESRCH;
  pollfd process{fd, POLLIN, 0};
  const int num_ready = poll(&process, 1, timeout_ms);
  close(fd);
  return num_ready == 1;
}

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "ferry-tools-XXXXXX").string();
  if (mkdtemp(path_.data()) == nullptr) std::abort();
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
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
