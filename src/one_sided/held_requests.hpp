#ifndef FERRY_ONE_SIDED_HELD_REQUESTS_HPP
#define FERRY_ONE_SIDED_HELD_REQUESTS_HPP

/// Requests that have left a ring for ranks that accept none at the moment, so that later requests for other ranks
/// proceed. The requests of each rank keep their order. One thread at a time.

#include <cstddef>
#include <deque>
#include <vector>

#include "one_sided/driver.hpp"

namespace ferry::one_sided {

/// Limit of held bytes for one rank, as many as a driver copies between two flushes of a peer: a rank that falls behind
/// for a moment delays no other rank, and one that is gone for long costs no more than one with a slow network.
inline constexpr std::size_t kMaxHeldBytes = std::size_t{4} << 20;

class HeldRequests {
 public:
  HeldRequests(std::size_t num_peers, std::size_t max_bytes_of_peer)
      : queues_(num_peers), max_bytes_of_peer_(max_bytes_of_peer) {}
  HeldRequests(const HeldRequests&) = delete;
  HeldRequests& operator=(const HeldRequests&) = delete;

  /// True if a later request for the peer must be held too.
  bool has(int peer) const { return !queues_[static_cast<std::size_t>(peer)].requests.empty(); }
  /// Holds a request behind earlier ones for its peer, with a copy of its source if the driver would copy it. False,
  /// without effect, if there is no room.
  bool hold(const NetworkRequest& request);
  /// First request of a peer for which `can_issue` is true, serving peers in turn; null: there is none. Valid until
  /// `drop_front`.
  const NetworkRequest* find(const CanIssue& can_issue);
  /// Removes the first request of the peer, which was issued.
  void drop_front(int peer);

 private:
  struct Held {
    NetworkRequest request;
    std::vector<std::byte> source;
    std::size_t num_bytes() const { return sizeof(Held) + source.size(); }
  };
  struct Queue {
    std::deque<Held> requests;
    std::size_t num_bytes = 0;
  };
  Queue& queue(int peer) { return queues_[static_cast<std::size_t>(peer)]; }

  std::vector<Queue> queues_;  // by peer
  std::vector<int> peers_;     // peers that have requests, the next one first
  const std::size_t max_bytes_of_peer_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_HELD_REQUESTS_HPP
