#ifndef FERRY_ONE_SIDED_RING_SOURCE_HPP
#define FERRY_ONE_SIDED_RING_SOURCE_HPP

/// Requests of kernels as the driver of the network takes them: reads the ring, does by itself what concerns ranks of
/// this node, and counts what is complete.
///
/// A kernel that waits for completion asks for kQuiet. The requests between two of those are an epoch: it is complete
/// when every peer that they went to has flushed and every answer is there, and epochs are published in order.
///
/// Requests for a rank that takes none at the moment leave the ring too and are held, as they are for the driver, so
/// that those for others go on. Only what is asked of one rank has an order, and that is kept. What a kQuiet waits for
/// is counted when requests leave the ring, and its flush of a rank is held behind them.

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
    std::byte* staging = nullptr;  ///< limits.local_bytes less the heap
    /// By rank: its symmetric memory if it is in this node, else null.
    std::vector<std::byte*> peer_heaps{};
    /// Where symmetric memory begins in the memory of the network.
    std::size_t heap_offset = 0;
    /// Driver::num_parts, of what takes the requests.
    std::uint64_t (*num_parts)(const Request& request) = nullptr;
    /// A peer is lost, and requests with it. Must not wait.
    std::function<void(int peer)> lost{};
    /// Words of a rank of this node have changed. Must not wait.
    std::function<void(int rank)> changed{};
    /// Held for one rank. With more the ring waits for it.
    std::size_t max_held_bytes = kMaxHeldBytes;
  };

  explicit RingSource(Options options);
  ~RingSource() override;
  RingSource(const RingSource&) = delete;
  RingSource& operator=(const RingSource&) = delete;

  const Request* front(const CanIssue& can_issue) override;
  void taken() override;
  bool needs_polling() const override { return polling_.load(std::memory_order_relaxed); }

  /// Whether kernels may write requests now and then. Any thread.
  void keep_polling(bool polling) { polling_.store(polling, std::memory_order_relaxed); }
  /// Requests taken so far. Any thread.
  std::uint64_t num_taken() const { return num_taken_.load(std::memory_order_relaxed); }
  /// Whether a request waits to be taken. Any thread.
  bool has_news() const;
  /// Why the ring has failed; ok while it has not. Any thread.
  Status status() const;

 private:
  struct Epoch {
    std::uint64_t end = 0;  ///< ticket after the kQuiet that closed it
    int num_open = 0;       ///< flushes and answers that are still to come
    bool closed = false;
  };
  class Pending;

  const Request* next_of_ring(const CanIssue& can_issue);
  bool read_next();
  void note_failure();
  void watch_writers();
  bool is_local(const device::Request& request) const;
  void apply(const device::Request& request);
  std::uint64_t apply_atomic(const device::Request& request);
  void put_here(const device::Request& request);
  std::byte* local_memory(std::uint64_t offset) const;
  bool is_staged(const device::Request& request) const;
  std::span<const std::byte> answered_bytes(const device::Request& request) const;
  void translate(const device::Request& request);
  void set_atomic(const device::Request& request, std::size_t offset);
  void expand(const device::Request& request);
  void finish_front();
  void finish_out();
  Pending* expect(const device::Request* request, std::uint64_t num_parts);
  void ended(Pending& pending);
  void publish();

  Options options_;
  RequestReader reader_;
  Request out_;  // what is next of the ring, as the driver knows it, if has_out_
  bool has_out_ = false;
  HeldRequests held_;
  const Request* offered_ = nullptr;  // what front() returned, until taken()
  bool ring_is_next_ = true;          // it and what is held are served in turn
  int num_served_ = 0;                // requests of the ring that were not offered, in this turn
  std::uint64_t value_ = 0;           // source of a put of 8 bytes
  std::vector<Request> expanded_;     // what one kQuiet or kFence is for the network, last first
  std::vector<bool> used_;            // by peer: ever
  std::vector<bool> unquiet_;         // by peer: since the last kQuiet
  std::deque<Epoch> epochs_;          // the last one is open
  std::vector<std::unique_ptr<Pending>> all_pending_;
  std::vector<Pending*> free_pending_;
  std::atomic<bool> polling_{false};
  std::atomic<std::uint64_t> num_taken_{0};
  mutable std::mutex mutex_;
  Status status_;  // guarded by mutex_
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_RING_SOURCE_HPP
