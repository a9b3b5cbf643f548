#ifndef FERRY_TESTS_UCX_CARD_CARD_MUTEX_HPP
#define FERRY_TESTS_UCX_CARD_CARD_MUTEX_HPP

#include <atomic>
#include <cstddef>
#include <mutex>

#include "node/pause_core.hpp"

namespace ferry::ucx_card {

/// Bytes that processors pass to each other as a whole.
inline constexpr std::size_t kLineBytes = 64;

/// A mutex whose waiting threads can be made not to sleep: on a virtual machine a thread that sleeps is back after tens
/// of microseconds, several times the latency of a card.
class CardMutex {
 public:
  void lock() {
    if (!spins_.load(std::memory_order_relaxed)) {
      mutex_.lock();
      return;
    }
    while (taken_.exchange(true, std::memory_order_acquire)) {
      while (taken_.load(std::memory_order_relaxed)) node::pause_core();
    }
  }
  void unlock() {
    if (!spins_.load(std::memory_order_relaxed)) {
      mutex_.unlock();
    } else {
      taken_.store(false, std::memory_order_release);
    }
  }
  /// Call while no thread has the mutex.
  void set_spins(bool spins) { spins_.store(spins, std::memory_order_relaxed); }

 private:
  std::mutex mutex_;
  std::atomic<bool> spins_{false};
  std::atomic<bool> taken_{false};
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_CARD_MUTEX_HPP
