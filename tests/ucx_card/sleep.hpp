#ifndef FERRY_TESTS_UCX_CARD_SLEEP_HPP
#define FERRY_TESTS_UCX_CARD_SLEEP_HPP

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace ferry::ucx_card {

inline constexpr std::uint64_t kNever = ~std::uint64_t{0};

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

/// Sleep of one thread. Others change what it waits for, in atomics, and then wake it, which costs a load where it is
/// awake.
class Sleep {
 public:
  /// Sleeps until the time has come or a wake(), unless `has_work`, which is called once wake() has an effect.
  template <typename HasWork>
  void until(std::uint64_t time_ns, HasWork has_work) {
    std::unique_lock lock(mutex_);
    is_asleep_ = true;
    if (!has_work()) {
      const auto is_woken = [this] { return !is_asleep_; };
      if (time_ns == kNever) {
        changed_.wait(lock, is_woken);
      } else {
        changed_.wait_until(
            lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(static_cast<std::int64_t>(time_ns))),
            is_woken);
      }
    }
    is_asleep_ = false;
  }

  void wake() {
    if (!is_asleep_) return;
    const std::lock_guard lock(mutex_);
    is_asleep_ = false;
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> is_asleep_{false};
};

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_SLEEP_HPP
