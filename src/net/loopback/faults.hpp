#ifndef FERRY_NET_LOOPBACK_FAULTS_HPP
#define FERRY_NET_LOOPBACK_FAULTS_HPP

/// What a bad network does to the operations of loopback engines, on command. For tests only.
///
/// Rules hold for every loopback network of this process, by the indices of the two ends, while the object lives; there
/// is one at a time. Any thread may call any function at any time. Whatever the rules, a channel keeps its order: what
/// was put before a notify arrives before it.

#include <cstdint>

namespace ferry::net {

class LoopbackFaults {
 public:
  LoopbackFaults();
  /// Ends all rules; what was held is delivered.
  ~LoopbackFaults();
  LoopbackFaults(const LoopbackFaults&) = delete;
  LoopbackFaults& operator=(const LoopbackFaults&) = delete;

  /// Each operation that `to` has not applied yet, and each later one, waits for `num_polls` more polls of `to`.
  void delay(int from, int to, int num_polls);
  /// They wait until release().
  void hold(int from, int to);
  /// Ends delay() and hold().
  void release(int from, int to);
  /// Every end applies what has arrived in a random order of channels, the same for the same seed and arrivals.
  void reorder(std::uint64_t seed);
  /// What `from` sends to `to` from now on vanishes silently.
  void drop(int from, int to);
  /// The connection between the two breaks: each hears that it lost the other (kTransport), and nothing more arrives,
  /// what is on its way included.
  void cut(int a, int b);
};

namespace loopback {

/// What the rules say about one pair of ends, and in which order to apply. For the engine.
struct PairRule {
  int delay_polls = 0;
  bool held = false;
  bool dropped = false;
  bool cut = false;
};
PairRule rule_for(int from, int to);
/// 0: apply in order of arrival.
std::uint64_t reorder_seed();

}  // namespace loopback
}  // namespace ferry::net

#endif  // FERRY_NET_LOOPBACK_FAULTS_HPP
