#ifndef FERRY_ONE_SIDED_RING_SOURCE_HPP
#define FERRY_ONE_SIDED_RING_SOURCE_HPP

/// Converts requests of kernels for the network's driver: reads the ring, completes requests for ranks of this node by
/// itself, and counts completions.
///
/// A kernel that waits for completion sends kQuiet. The requests between two kQuiets are an epoch: it is complete when
/// every peer that they went to has flushed and every answer has arrived; epochs are published in order. Likewise the
/// requests to one peer between two kQuietPeer, which are answered.
///
/// Requests for a rank that accepts none at the moment also leave the ring and are held in the driver's form, so that
/// requests for other ranks proceed. Only requests to the same rank are ordered, and they keep their order. Requests
/// that a kQuiet waits for are counted when they leave the ring, and its flush of a rank is held behind them.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "one_sided/driver.hpp"
#include "one_sided/held_requests.hpp"
#include "one_sided/request_reader.hpp"

namespace ferry::one_sided {

class RingSource final : public RequestSource {
 public:
  struct Options {
    RequestRingMemory ring;
    RequestLimits limits;
    std::byte* heap = nullptr;     ///< this rank's symmetric memory, limits.remote_bytes of it
    std::byte* staging = nullptr;  ///< limits.local_bytes minus the heap
    /// Symmetric memory by rank; null for ranks of other nodes.
    std::vector<std::byte*> peer_heaps{};
    /// Offset of symmetric memory in the network's memory.
    std::size_t heap_offset = 0;
    /// Driver::num_parts of the driver that takes the requests.
    std::uint64_t (*num_parts)(const NetworkRequest& request) = nullptr;
    /// Reports that a peer is lost with requests. Must not wait.
    std::function<void(int peer)> lost{};
    /// Reports that words of a rank of this node have changed. Must not wait.
    std::function<void(int rank)> changed{};
    /// Limit of held bytes for one rank. Beyond it the ring waits for that rank.
    std::size_t max_held_bytes = kMaxHeldBytes;
  };

  explicit RingSource(Options options);
  ~RingSource() override;
  RingSource(const RingSource&) = delete;
  RingSource& operator=(const RingSource&) = delete;

  const NetworkRequest* front(const CanIssue& can_issue) override;
  void taken() override;
  bool needs_polling() const override { return polling_.load(std::memory_order_relaxed); }

  /// Sets whether kernels may write requests now. Any thread.
  void keep_polling(bool polling) { polling_.store(polling, std::memory_order_relaxed); }
  /// Number of requests taken so far. Any thread.
  std::uint64_t num_taken() const { return num_taken_.load(std::memory_order_relaxed); }
  /// True if a request waits to be taken. Any thread.
  bool has_news() const;
  /// Reason for the ring's failure; ok if it has not failed. Any thread.
  Status status() const;

 private:
  struct Epoch {
    std::uint64_t end = 0;  ///< ticket after the kQuiet that closed it
    int num_open = 0;       ///< flushes and answers that are still outstanding
    bool closed = false;
  };
  struct PeerEpoch {
    int num_open = 0;  ///< as above, of the peer
    bool closed = false;
    bool lost = false;       ///< the peer was lost with one of them
    bool has_reply = false;  ///< of the kQuietPeer that closed it
    std::uint32_t reply = 0;
  };
  class Pending;

  const NetworkRequest* next_of_ring(const CanIssue& can_issue);
  bool read_next();
  void note_failure();
  void watch_writers();
  bool is_local(const device::Request& request) const;
  void apply(const device::Request& request);
  std::uint64_t apply_atomic(const device::Request& request);
  std::byte* local_memory(std::uint64_t offset) const;
  bool is_staged(const device::Request& request) const;
  std::span<const std::byte> answered_bytes(const device::Request& request) const;
  void translate(const device::Request& request);
  void expand(const device::Request& request);
  void expand_quiet_of_peer(const device::Request& request);
  void flush(int peer);
  void finish_front();
  void finish_out();
  Pending* expect(int peer, const device::Request* request, std::uint64_t num_parts);
  void ended(Pending& pending);
  void publish();
  void publish(int peer);

  Options options_;
  RequestReader reader_;
  NetworkRequest out_;  // next request of the ring, in the driver's form, if has_out_
  bool has_out_ = false;
  HeldRequests held_;
  const NetworkRequest* offered_ = nullptr;         // result of the last front(), until taken()
  bool ring_is_next_ = true;                        // the ring and the held requests are served in turn
  int num_served_ = 0;                              // requests of the ring in this turn that were not offered
  std::uint64_t value_ = 0;                         // source of a put of 8 bytes
  std::vector<NetworkRequest> expanded_;            // requests for the network of one quiet or kFence, last first
  std::vector<bool> used_;                          // by peer: used at any time
  std::vector<bool> unquiet_;                       // by peer: used since its last flush
  std::deque<Epoch> epochs_;                        // the last one is open
  std::vector<std::deque<PeerEpoch>> peer_epochs_;  // by peer; the last one of each is open
  std::vector<std::unique_ptr<Pending>> all_pending_;
  std::vector<Pending*> free_pending_;
  std::atomic<bool> polling_{false};
  std::atomic<std::uint64_t> num_taken_{0};
  mutable std::mutex mutex_;
  Status status_;  // guarded by mutex_
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_RING_SOURCE_HPP
