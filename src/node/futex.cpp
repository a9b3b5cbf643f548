#include "node/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "ferry/bootstrap.hpp"

namespace ferry::node {

void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns) {
  const timespec timeout{timeout_ns / kNsPerSecond, timeout_ns % kNsPerSecond};
  // Not FUTEX_PRIVATE: the word is shared between processes. Errors (EAGAIN, EINTR, ETIMEDOUT) all mean "poll again".
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(const std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNsPerSecond + now.tv_nsec;
}

}  // namespace ferry::node
