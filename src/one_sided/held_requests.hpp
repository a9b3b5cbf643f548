#ifndef FERRY_ONE_SIDED_HELD_REQUESTS_HPP
#define FERRY_ONE_SIDED_HELD_REQUESTS_HPP

/// Requests that have left a ring for ranks which take none at the moment, so that those behind them for other ranks go
/// on. Each rank's stay in their order. One thread at a time.

#include <cstddef>
#include <deque>
#include <vector>

#include "one_sided/driver.hpp"

namespace ferry::one_sided {

/// What is kept for one rank, in bytes. As much as a driver copies between two flushes of a peer: a rank that falls
/// behind for a moment holds up nobody, and one that is gone for long costs no more than one that the network is slow
/// with.
inline constexpr std::size_t kMaxHeldBytes = std::size_t{4} << 20;

class HeldRequests {
 public:
  HeldRequests(std::size_t num_peers, std::size_t max_bytes_of_peer)
      : queues_(num_peers), max_bytes_of_peer_(max_bytes_of_peer) {}
  HeldRequests(const HeldRequests&) = delete;
  HeldRequests& operator=(const HeldRequests&) = delete;

  /// Whether a later request for the peer must be held too.
  bool has(int peer) const { return !queues_[static_cast<std::size_t>(peer)].requests.empty(); }
  /// Holds it behind those of its peer, with a copy of its source where the driver is to copy that. False, and nothing
  /// has changed: there is no room.
  bool hold(const Request& request);
  /// The first request of a peer that `can_issue` lets pass, peers in turn; null: there is none. Until `drop_front`.
  const Request* find(const CanIssue& can_issue);
  /// The first request of the peer was issued.
  void drop_front(int peer);

 private:
  struct Held {
    Request request;
    std::vector<std::byte> source;
    std::size_t num_bytes() const { return sizeof(Held) + source.size(); }
  };
  struct Queue {
    std::deque<Held> requests;
    std::size_t num_bytes = 0;
  };
  Queue& queue(int peer) { return queues_[static_cast<std::size_t>(peer)]; }

  std::vector<Queue> queues_;  // by peer
  std::vector<int> peers_;     // those that have requests, next first
  const std::size_t max_bytes_of_peer_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_HELD_REQUESTS_HPP
