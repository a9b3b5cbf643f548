#ifndef FERRY_TESTS_SUPPORT_LOOPBACK_FAULTS_HPP
#define FERRY_TESTS_SUPPORT_LOOPBACK_FAULTS_HPP

/// Injects the faults of a bad network into the operations of loopback engines.
///
/// Rules apply to every loopback network of this process, by the indices of the two ends, while the object lives; there
/// is one at a time. Any thread may call any function at any time. Whatever the rules, puts before a notify on its
/// channel arrive before it; and all rules except scramble() keep the whole order of a channel.

#include <cstdint>

namespace ferry::net {

/// What the rules have actually done to operations since the LoopbackFaults was created, at all ends together.
struct LoopbackFaultCounts {
  std::uint64_t num_delayed = 0;         ///< had to wait for polls, by delay() or scramble()
  std::uint64_t num_overtaken = 0;       ///< arrived after one that the same end had sent later
  std::uint64_t num_stale_notifies = 0;  ///< notifies that arrived after a later one of their own channel
};

class LoopbackFaults {
 public:
  LoopbackFaults();
  /// Ends all rules; what was held is delivered.
  ~LoopbackFaults();
  LoopbackFaults(const LoopbackFaults&) = delete;
  LoopbackFaults& operator=(const LoopbackFaults&) = delete;

  /// Each operation that `to` has not applied yet, and each later one, waits for `num_polls` more polls of `to`.
  void delay(int from, int to, int num_polls);
  /// The same operations wait until release().
  void hold(int from, int to);
  /// Ends delay() and hold().
  void release(int from, int to);
  /// Every end applies what has arrived in a random order of channels, the same for the same seed and arrivals.
  void reorder(std::uint64_t seed);
  /// As little order as engine.hpp promises: each operation waits for a number of polls of its own, drawn from the
  /// seed, so that puts, notifies of one channel and channels overtake each other. Only a notify stays behind the puts
  /// before it on its channel, and the end of a peer behind everything that it sent.
  void scramble(std::uint64_t seed);
  /// What `from` sends to `to` from now on vanishes silently.
  void drop(int from, int to);
  /// The connection between the two breaks: each is notified that it lost the other (kTransport), and nothing more
  /// arrives, not even what is already in transit.
  void cut(int a, int b);

  LoopbackFaultCounts counts() const;
};

}  // namespace ferry::net

#endif  // FERRY_TESTS_SUPPORT_LOOPBACK_FAULTS_HPP
