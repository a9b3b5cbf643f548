#ifndef FERRY_TESTS_SUPPORT_LOOPBACK_FAULTS_HPP
#define FERRY_TESTS_SUPPORT_LOOPBACK_FAULTS_HPP

/// Injects the faults of a bad network into the operations of loopback engines.
///
/// Rules apply to every loopback network of this process, by the indices of the two ends, while the object lives; only
/// one may exist at a time. Any thread may call any function at any time. Under all rules, puts arrive before a later
/// notify on their channel; all rules except scramble() keep the whole order of a channel.

#include <cstdint>

namespace ferry::net {

/// Number of operations that the rules have affected since the LoopbackFaults was created, at all ends together.
struct LoopbackFaultCounts {
  std::uint64_t num_delayed = 0;         ///< operations that waited for polls, by delay() or scramble()
  std::uint64_t num_overtaken = 0;       ///< operations that arrived after one that the same end sent later
  std::uint64_t num_stale_notifies = 0;  ///< notifies that arrived after a later one of their channel
};

class LoopbackFaults {
 public:
  LoopbackFaults();
  /// Ends all rules; held operations are delivered.
  ~LoopbackFaults();
  LoopbackFaults(const LoopbackFaults&) = delete;
  LoopbackFaults& operator=(const LoopbackFaults&) = delete;

  /// Each operation that `to` has not applied yet, and each later one, waits for `num_polls` more polls of `to`.
  void delay(int from, int to, int num_polls);
  /// The operations that delay() would affect wait until release().
  void hold(int from, int to);
  /// Ends delay() and hold().
  void release(int from, int to);
  /// Every end applies arrived operations in a random order of channels, which the seed and the arrivals determine.
  void reorder(std::uint64_t seed);
  /// Keeps only the order that engine.hpp guarantees: each operation waits for its own number of polls, drawn from the
  /// seed, so that puts, notifies of one channel, and channels overtake each other. A notify still stays behind the
  /// earlier puts on its channel, and the end of a peer behind everything that it sent.
  void scramble(std::uint64_t seed);
  /// Silently discards operations that `from` sends to `to` from now on.
  void drop(int from, int to);
  /// Breaks the connection between the two ends: each is notified that it lost the other (kTransport), and no further
  /// operation arrives, not even those in transit.
  /// `num_ends`: only in networks of that many ends; 0: in all.
  void cut(int a, int b, int num_ends = 0);
  /// Breaks all connections between two nodes of a group: those of rails, whose ends are nodes, and those of latency
  /// mode, whose ends are ranks.
  void cut_nodes(int a, int b, int num_nodes, int ranks_per_node);

  LoopbackFaultCounts counts() const;
};

}  // namespace ferry::net

#endif  // FERRY_TESTS_SUPPORT_LOOPBACK_FAULTS_HPP
