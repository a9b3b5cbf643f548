#include "launch/shared_area.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "ferry/bootstrap.hpp"
#include "launch/clock.hpp"

namespace ferry::launch {

namespace {

// Raw futexes, because std::atomic's wait supports neither other processes nor a deadline, and a process-shared mutex
// with a condition variable would stay locked forever if a rank is killed while it holds the mutex.
std::uint32_t* futex_word(std::atomic<std::uint32_t>& word) { return reinterpret_cast<std::uint32_t*>(&word); }

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) {
  const timespec timeout{static_cast<time_t>(timeout_ns / kNsPerSecond), static_cast<long>(timeout_ns % kNsPerSecond)};
  // Interrupted, woken early or changed already: the caller reads the word again in every case.
  syscall(SYS_futex, futex_word(word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

Result<SharedArea> SharedArea::map(std::size_t size_bytes) {
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status(ErrorCode::kSystem, fmt::format("cannot map {} bytes shared with the ranks: {}; use fewer ranks or "
                                                  "tokens",
                                                  size_bytes, std::strerror(errno)));
  }
  SharedArea area;
  area.data_ = data;
  area.size_bytes_ = size_bytes;
  return area;
}

SharedArea::SharedArea(SharedArea&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

SharedArea& SharedArea::operator=(SharedArea&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

SharedArea::~SharedArea() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

Status SharedBarrier::wait(std::uint32_t num_ranks, std::int64_t timeout_ns) {
  const std::uint32_t generation = generation_.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_ranks) {
    num_arrived_.store(0, std::memory_order_relaxed);
    released_ns_.store(now_ns(), std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    futex_wake_all(generation_);
    return {};
  }
  const std::int64_t deadline_ns = now_ns() + timeout_ns;
  while (generation_.load(std::memory_order_acquire) == generation) {
    const std::int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0) {
      return {ErrorCode::kTimeout,
              fmt::format("start barrier: {} of {} ranks arrived within {} s", num_arrived_.load(), num_ranks,
                          static_cast<double>(timeout_ns) / static_cast<double>(kNsPerSecond))};
    }
    futex_wait(generation_, generation, left_ns);
  }
  return {};
}

}  // namespace ferry::launch
