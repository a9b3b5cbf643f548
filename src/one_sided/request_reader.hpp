#ifndef FERRY_ONE_SIDED_REQUEST_READER_HPP
#define FERRY_ONE_SIDED_REQUEST_READER_HPP

/// The host's end of a ring of requests (ferry/device/request.hpp): takes them in the order of their tickets and checks
/// every one, because whatever writes the ring is not trusted to be right. Nothing here waits. One thread at a time.

#include <cstdint>

#include "ferry/device/request.hpp"
#include "ferry/status.hpp"

namespace ferry::one_sided {

/// What a request may name.
struct RequestLimits {
  int num_peers = 1;
  std::uint64_t local_bytes = 0;   ///< symmetric memory, and staging behind it
  std::uint64_t remote_bytes = 0;  ///< symmetric memory of any peer
  std::int64_t timeout_ns = 0;     ///< for the rest of a request of which a part is there
};

/// The memory of a ring as the host sees it.
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

  /// The next request, good and whole, until `pop`; null if there is none now, or never again.
  const device::Request* front();
  /// What the front request names has been read: its slot may be written again.
  void pop();
  /// Requests taken so far.
  std::uint64_t num_taken() const { return num_taken_; }

  /// Requests below `end` are complete at their targets, and have been answered.
  void complete(std::uint64_t end);
  /// Answers the request that asked for `reply`.
  void answer(std::uint32_t reply, std::uint64_t value);
  /// A request will not be completed, because its peer is lost; nor will `reply` come. `staging_in_use`: its staging
  /// memory may still be written.
  void lose();
  void lose_reply(std::uint32_t reply, bool staging_in_use);

  /// Whether a writer has gone without the request that it took a ticket for.
  bool is_broken() const;

  /// Why no request is taken any more; ok while they are. kInvalidArgument: one names what it must not; kTimeout: a
  /// writer has ended in the middle of one.
  const Status& status() const { return status_; }
  /// Ends it: writers that wait end too.
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
