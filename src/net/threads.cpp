#include "net/threads.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <exception>

namespace ferry::net {
namespace {

/// Longest wait until the system has forgotten a thread that has ended.
constexpr std::chrono::seconds kForgetTime{1};

bool exists(int thread_id) { return syscall(SYS_tgkill, getpid(), thread_id, 0) == 0 || errno != ESRCH; }

}  // namespace

Status ReservedThreads::reserve(int count) {
  is_over_ = false;
  ids_.reserve(static_cast<std::size_t>(count));
  threads_.reserve(static_cast<std::size_t>(count));
  const auto idle = [this] {
    std::unique_lock lock(mutex_);
    ids_.push_back(static_cast<int>(syscall(SYS_gettid)));
    changed_.wait(lock, [this] { return is_over_; });
  };
  // New threads inherit the mask: signals are left to the program's threads.
  sigset_t every_signal;
  sigset_t former;
  sigfillset(&every_signal);
  pthread_sigmask(SIG_SETMASK, &every_signal, &former);
  Status status;
  try {
    for (int i = 0; i < count; ++i) threads_.emplace_back(idle);
  } catch (const std::exception& error) {
    status = Status(ErrorCode::kSystem,
                    fmt::format("the network needs {} threads, of which {} could be started: {}; raise the limit of "
                                "threads (ulimit -u, the container's limit of processes) or of address space (ulimit "
                                "-v)",
                                count, threads_.size(), error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
  if (!status.ok()) give_back();
  return status;
}

void ReservedThreads::give_back() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  // A thread counts until the system has removed it, which may be after the join.
  const auto deadline = std::chrono::steady_clock::now() + kForgetTime;
  for (const int id : ids_) {
    while (exists(id) && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  }
  ids_.clear();
}

}  // namespace ferry::net
