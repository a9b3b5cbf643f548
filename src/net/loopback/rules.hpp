#ifndef FERRY_NET_LOOPBACK_RULES_HPP
#define FERRY_NET_LOOPBACK_RULES_HPP

/// Faults of a bad network that a test imposes on the loopback engines of its process
/// (tests/support/loopback_faults.hpp). Programs without such rules pay for one load.

#include <atomic>
#include <cstdint>

namespace ferry::net::loopback {

/// Rule for operations that one end sends to another.
struct PairRule {
  int delay_polls = 0;
  bool held = false;
  bool dropped = false;
  bool cut = false;
};

enum class Mix { kNothing, kChannels, kAll };
/// Order that is broken, and the seed for that.
struct MixRule {
  Mix mix = Mix::kNothing;
  std::uint64_t seed = 0;
};

/// Any thread may call any function at any time.
class Rules {
 public:
  /// Rule for two ends of a network that has `num_ends`.
  virtual PairRule for_pair(int from, int to, int num_ends) = 0;
  virtual MixRule mix() = 0;
  virtual void count_delayed() = 0;
  virtual void count_overtaken(bool stale_notify) = 0;

 protected:
  ~Rules() = default;
};

/// Null: there are none. Rules must outlive the engines that have seen them.
inline std::atomic<Rules*> imposed_rules{nullptr};

inline PairRule rule_for(int from, int to, int num_ends) {
  Rules* rules = imposed_rules.load(std::memory_order_acquire);
  return rules == nullptr ? PairRule{} : rules->for_pair(from, to, num_ends);
}

inline MixRule mix_rule() {
  Rules* rules = imposed_rules.load(std::memory_order_acquire);
  return rules == nullptr ? MixRule{} : rules->mix();
}

inline void count_delayed() {
  if (Rules* rules = imposed_rules.load(std::memory_order_acquire); rules != nullptr) rules->count_delayed();
}

inline void count_overtaken(bool stale_notify) {
  if (Rules* rules = imposed_rules.load(std::memory_order_acquire); rules != nullptr) {
    rules->count_overtaken(stale_notify);
  }
}

}  // namespace ferry::net::loopback

#endif  // FERRY_NET_LOOPBACK_RULES_HPP
