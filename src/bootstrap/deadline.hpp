#ifndef FERRY_BOOTSTRAP_DEADLINE_HPP
#define FERRY_BOOTSTRAP_DEADLINE_HPP

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {

/// Time on the monotonic clock at which a wait ends.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Saturates, so that INT64_MAX means "no deadline".
  static Deadline after(std::int64_t timeout_ns) { return after(Clock::now(), timeout_ns); }

  Deadline extended_by(std::int64_t extra_ns) const { return after(time_, extra_ns); }

  std::int64_t remaining_ns() const {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(time_ - Clock::now()).count();
    return std::max<std::int64_t>(left, 0);
  }
  bool expired() const { return Clock::now() >= time_; }
  Clock::time_point time() const { return time_; }

  friend Deadline earlier(Deadline a, Deadline b) { return a.time_ < b.time_ ? a : b; }

 private:
  explicit Deadline(Clock::time_point time) : time_(time) {}

  static Deadline after(Clock::time_point start, std::int64_t timeout_ns) {
    const std::int64_t room_ns = std::chrono::nanoseconds(Clock::time_point::max() - start).count();
    return Deadline(start + std::chrono::nanoseconds(std::clamp<std::int64_t>(timeout_ns, 0, room_ns)));
  }

  Clock::time_point time_;
};

/// Time that a rank waits past its deadline for rank 0 to report which rank was late. Rank 0's report names the right
/// rank and is the same on all ranks. Enough for several round trips on a loaded machine; half the timeout at most, so
/// that no call takes more than twice its timeout.
inline constexpr std::int64_t kMaxGraceNs = 2 * kNsPerSecond;
constexpr std::int64_t grace_ns(std::int64_t timeout_ns) { return std::min(timeout_ns / 2, kMaxGraceNs); }

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_DEADLINE_HPP
