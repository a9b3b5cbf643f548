#ifndef FERRY_BOOTSTRAP_DEADLINE_HPP
#define FERRY_BOOTSTRAP_DEADLINE_HPP

/// A moment on the monotonic clock by which a wait must end.

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace ferry::bootstrap {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Saturates, so that "for ever" may be written as the largest number.
  static Deadline after(std::int64_t timeout_ns) { return after(Clock::now(), timeout_ns); }

  Deadline extended_by(std::int64_t extra_ns) const { return after(moment_, extra_ns); }

  std::int64_t remaining_ns() const {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(moment_ - Clock::now()).count();
    return std::max<std::int64_t>(left, 0);
  }
  bool expired() const { return Clock::now() >= moment_; }
  Clock::time_point moment() const { return moment_; }

  friend Deadline earlier(Deadline a, Deadline b) { return a.moment_ < b.moment_ ? a : b; }

 private:
  explicit Deadline(Clock::time_point moment) : moment_(moment) {}

  static Deadline after(Clock::time_point start, std::int64_t timeout_ns) {
    const std::int64_t room_ns = std::chrono::nanoseconds(Clock::time_point::max() - start).count();
    return Deadline(start + std::chrono::nanoseconds(std::clamp<std::int64_t>(timeout_ns, 0, room_ns)));
  }

  Clock::time_point moment_;
};

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_DEADLINE_HPP
