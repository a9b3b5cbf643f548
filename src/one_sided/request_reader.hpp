#ifndef FERRY_ONE_SIDED_REQUEST_READER_HPP
#define FERRY_ONE_SIDED_REQUEST_READER_HPP

/// Host end of a ring of requests (ferry/device/proxy_request.hpp): takes them in ticket order and checks each, because
/// the writer of the ring is not trusted. Nothing here waits. One thread at a time.

#include <cstdint>

#include "ferry/device/proxy_request.hpp"
#include "ferry/status.hpp"

namespace ferry::one_sided {

/// Bounds of the values in a request.
struct RequestLimits {
  int num_peers = 1;
  std::uint64_t local_bytes = 0;   ///< symmetric memory, followed by staging
  std::uint64_t remote_bytes = 0;  ///< symmetric memory of any peer
  std::int64_t timeout_ns = 0;     ///< for the missing part of a request that has arrived in part
};

/// Memory of a ring, as the host sees it.
struct RequestRingMemory {
  std::uint64_t* words = nullptr;  ///< [num_slots][kRequestWords]
  std::uint64_t num_slots = 0;     ///< a power of two, at least 2
  device::RequestCounts* counts = nullptr;
  device::RequestReply* replies = nullptr;  ///< [kNumReplies]
};

class RequestReader {
 public:
  RequestReader(const RequestRingMemory& ring, const RequestLimits& limits) : ring_(ring), limits_(limits) {}
  RequestReader(const RequestReader&) = delete;
  RequestReader& operator=(const RequestReader&) = delete;

  /// Next complete and valid request, until `pop`; null if there is none now, or the reader has failed.
  const device::Request* front();
  /// The memory that the front request names has been read: its slot may be written again.
  void pop();
  /// Number of requests taken so far.
  std::uint64_t num_taken() const { return num_taken_; }

  /// Publishes that requests below `end` are complete at their targets and have been answered.
  void complete(std::uint64_t end);
  /// Answers the request that asked for `reply`.
  void answer(std::uint32_t reply, std::uint64_t value);
  /// Publishes that a request will not complete, or that `reply` will not be answered, because its peer is lost.
  /// `staging_in_use`: its staging memory may still be written.
  void lose();
  void lose_reply(std::uint32_t reply, bool staging_in_use);

  /// True if a writer gave up after it took a ticket for a request.
  bool is_broken() const;

  /// Reason for which no more requests are taken; ok while they are. kInvalidArgument: a request has values out of
  /// bounds; kTimeout: a writer ended in the middle of a request.
  const Status& status() const { return status_; }
  /// Ends the reader, and the waits of writers.
  void fail(const Status& why);

 private:
  void watch_writer(bool any_word);
  Status check(const device::Request& request) const;

  RequestRingMemory ring_;
  RequestLimits limits_;
  device::Request front_;
  bool has_front_ = false;
  std::uint64_t num_taken_ = 0;
  std::int64_t partial_since_ns_ = 0;
  unsigned num_partial_looks_ = 0;
  Status status_;
};

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_REQUEST_READER_HPP
