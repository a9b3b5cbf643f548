#include "launch/child_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

namespace ferry::launch {

namespace {

/// Never returns, because the child must not run the parent's destructors.
[[noreturn]] void run_child(const ChildProcess::Body& body, pid_t parent, int report_fd) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // the parent ended before the prctl above
  int exit_code = ChildProcess::kExitException;
  try {
    exit_code = body(ReportPipe(report_fd));
  } catch (...) {
    // The exit code reports the exception.
  }
  std::fflush(nullptr);
  _exit(exit_code);
}

ProcessEnd end_of(int wait_status) {
  if (WIFSIGNALED(wait_status)) return {0, WTERMSIG(wait_status)};
  return {WEXITSTATUS(wait_status), 0};
}

}  // namespace

bool ReportPipe::send(std::string_view text) const {
  while (!text.empty()) {
    const ssize_t num_bytes = write(fd_, text.data(), text.size());
    if (num_bytes < 0 && errno == EINTR) continue;
    if (num_bytes <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(num_bytes));
  }
  return true;
}

Result<ChildProcess> ChildProcess::start(const Body& body) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    return Status(ErrorCode::kSystem, fmt::format("cannot make a pipe to a child process: {}; raise the limit on open "
                                                  "files (ulimit -n)",
                                                  std::strerror(errno)));
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  std::signal(SIGCHLD, SIG_DFL);  // if this process inherited SIG_IGN, the system would reap the child unseen
  std::fflush(nullptr);           // the child must not print output that this process has buffered
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    run_child(body, parent, ends[1]);
  }
  const int fork_errno = errno;
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return Status(ErrorCode::kSystem,
                  fmt::format("cannot fork: {}; raise the limit on processes (ulimit -u)", std::strerror(fork_errno)));
  }
  ChildProcess child;
  child.pid_ = pid;
  child.report_fd_ = ends[0];
  return child;
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      report_fd_(std::exchange(other.report_fd_, -1)),
      report_(std::move(other.report_)),
      end_(other.end_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(report_fd_, other.report_fd_);
  std::swap(report_, other.report_);
  std::swap(end_, other.end_);
  return *this;
}

void ChildProcess::send_signal(int signal) const {
  if (pid_ > 0) ::kill(pid_, signal);
}

bool ChildProcess::read_report() {
  while (report_fd_ >= 0) {
    pollfd ready{report_fd_, POLLIN, 0};
    if (poll(&ready, 1, -1) < 0) continue;
    const std::size_t num_before = report_.size();
    drain_report();
    if (report_.size() > num_before) return true;
  }
  return false;
}

void ChildProcess::drain_report() {
  std::array<char, 4096> part{};
  while (report_fd_ >= 0) {
    const ssize_t num_bytes = read(report_fd_, part.data(), part.size());
    if (num_bytes > 0) {
      report_.append(part.data(), static_cast<std::size_t>(num_bytes));
    } else if (num_bytes == 0 || (errno != EINTR && errno != EAGAIN)) {
      close_report();
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

ProcessEnd ChildProcess::wait() {
  while (read_report()) {
  }
  return reap();
}

std::optional<ProcessEnd> ChildProcess::poll_end() {
  if (pid_ > 0) {
    int wait_status = 0;
    if (waitpid(pid_, &wait_status, WNOHANG) != pid_) return std::nullopt;
    pid_ = -1;
    end_ = end_of(wait_status);
    drain_report();
    close_report();  // a descendant of the child may still hold the other end
  }
  return end_;
}

ProcessEnd ChildProcess::kill() {
  send_signal(SIGKILL);
  drain_report();
  close_report();
  return reap();
}

ProcessEnd ChildProcess::reap() {
  if (pid_ > 0) {
    int wait_status = 0;
    while (waitpid(pid_, &wait_status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    end_ = end_of(wait_status);
  }
  return end_;
}

void ChildProcess::close_report() {
  if (report_fd_ >= 0) close(std::exchange(report_fd_, -1));
}

}  // namespace ferry::launch
