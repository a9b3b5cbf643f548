#ifndef FERRY_RAIL_REST_HPP
#define FERRY_RAIL_REST_HPP

#include <cstdint>

namespace ferry::rail {

/// Decides when a network that kernels use may sleep: kernels cannot wake it. Looks at regular intervals at a sum of
/// words that changes with every movement.
class Rest {
 public:
  enum class Decision { kNone, kPoll, kSleep };

  /// The network polls for `poll_ns` after the last movement; negative: always.
  Rest(std::int64_t poll_ns, std::int64_t interval_ns)
      : num_still_looks_allowed_(poll_ns < 0 ? -1 : (poll_ns + interval_ns - 1) / interval_ns) {}

  /// kPoll at every movement, kSleep once after it.
  Decision look(std::uint64_t sum) {
    if (sum != last_sum_) {
      last_sum_ = sum;
      num_still_looks_ = 0;
      return Decision::kPoll;
    }
    return ++num_still_looks_ == num_still_looks_allowed_ ? Decision::kSleep : Decision::kNone;
  }

 private:
  const std::int64_t num_still_looks_allowed_;  // -1: any number
  std::int64_t num_still_looks_ = 0;
  std::uint64_t last_sum_ = 0;
};

}  // namespace ferry::rail

#endif  // FERRY_RAIL_REST_HPP
