/// The thread of a driver: when it drives the engine, and when it sleeps.

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "ferry/bootstrap.hpp"
#include "node/futex.hpp"
#include "one_sided/driver.hpp"

namespace ferry::one_sided {
namespace {

using Clock = std::chrono::steady_clock;

/// Time that the thread polls before it sleeps: longer than a peer needs over TCP to get an answer and send its next
/// request.
constexpr std::chrono::microseconds kSpinTime{20};
/// Longest sleep. Bounds the cost of a wake-up lost by a network library.
constexpr std::int64_t kLongestSleepNs = 100'000'000;
/// First and longest sleep if nothing wakes the thread.
constexpr std::int64_t kFirstNapNs = 50'000;
constexpr std::int64_t kLongestNapNs = 2'000'000;
///  Interval at which the thread checks whether a caller still drives the engine. Bounds how long peers wait for this
///  rank after its caller has stopped; a wake-up per call would cost every call more than that.
constexpr std::int64_t kRestNs = 100'000;
/// The thread keeps checking for this long after the last caller: usually a caller returns.
constexpr std::int64_t kRecentNs = 200'000;

void poll_for(std::span<pollfd> entries, std::int64_t timeout_ns) {
  const timespec timeout{timeout_ns / kNsPerSecond, timeout_ns % kNsPerSecond};
  ppoll(entries.data(), entries.size(), &timeout, nullptr);
}

}  // namespace

bool Driver::must_poll_sources() {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(sources_, [](const RequestSource* source) { return source->needs_polling(); });
}

/// Takes the lock only if there is work: a caller that drives holds it nearly all the time and would have to wake this
/// thread after each release.
void Driver::run() {
  Clock::time_point last_move = Clock::now();
  while (true) {
    if (stop_.load(std::memory_order_relaxed)) return;
    const bool must_poll = num_sources_.load(std::memory_order_relaxed) > 0 && must_poll_sources();
    const bool others_drive = num_drivers_.load(std::memory_order_relaxed) > 0;
    if ((must_poll || !others_drive) && turn(1).any) {
      last_move = Clock::now();
      nap_ns_ = 0;
    } else if (must_poll) {
      if (Clock::now() - last_move >= kSpinTime) std::this_thread::yield();
    } else if (others_drive || node::monotonic_ns() - last_drive_ns_.load(std::memory_order_relaxed) < kRecentNs) {
      asleep_.store(true, std::memory_order_seq_cst);
      sleep(-1, kRestNs);
    } else if (Clock::now() - last_move < kSpinTime) {
      std::this_thread::yield();  // callers need the lock, and peers on this host may need the core
    } else {
      sleep_until_woken();
    }
  }
}

/// Sleeps until the engine has work or another thread wakes this one.
void Driver::sleep_until_woken() {
  int engine_fd = -1;
  std::int64_t timeout_ns = kLongestSleepNs;
  {
    const std::lock_guard lock(mutex_);
    if (stop_.load(std::memory_order_relaxed)) return;
    // A thread that takes events from the engine after this sees the flag and wakes this thread.
    asleep_.store(true, std::memory_order_seq_cst);
    // A source that expects requests since this thread has asked it did not find it asleep.
    if (std::ranges::any_of(sources_, [](const RequestSource* source) { return source->needs_polling(); })) {
      asleep_.store(false, std::memory_order_relaxed);
      return;
    }
    if (engine_->event_fd() >= 0 && engine_->arm()) {
      engine_fd = engine_->event_fd();
      armed_.store(true, std::memory_order_seq_cst);
      nap_ns_ = 0;
    } else {
      timeout_ns = nap_ns_;
      // Usually an operation has just arrived.
      nap_ns_ = std::clamp(nap_ns_ * 2, kFirstNapNs, kLongestNapNs);
    }
  }
  sleep(engine_fd, timeout_ns);
}

void Driver::sleep(int engine_fd, std::int64_t timeout_ns) {
  std::array<pollfd, 2> entries{pollfd{wake_.get(), POLLIN, 0}, pollfd{engine_fd, POLLIN, 0}};
  if (timeout_ns > 0) poll_for(entries, timeout_ns);
  armed_.store(false, std::memory_order_relaxed);
  asleep_.store(false, std::memory_order_relaxed);
  if ((entries[0].revents & POLLIN) != 0) wake_.clear();
}

}  // namespace ferry::one_sided
