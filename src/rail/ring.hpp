#ifndef FERRY_RAIL_RING_HPP
#define FERRY_RAIL_RING_HPP

/// Rings between this rank and one rail peer, one in each direction, for use by a thread of this rank. Items of equal
/// size pass through them in *exchanges*: both ends know the number of items in each direction beforehand, and the
/// receiver checks every chunk against it.
///
/// Nothing here waits. A producer reserves room in a chunk, writes items there and commits; a consumer reads the items
/// at the front and releases them. Both functions report if that is not possible yet. net::RingWords describes how the
/// ends and the proxy between them synchronise.

#include <cstdint>
#include <span>

#include "net/proxy.hpp"
#include "rail/chunk_reader.hpp"
#include "rail/rail_memory.hpp"

namespace ferry::rail {

/// Items that one exchange carries to and from a rail peer.
struct Flow {
  std::int64_t num_out = 0;
  std::int64_t num_in = 0;
  std::size_t out_item_bytes = 0;  ///< a multiple of 16, at most Ring::capacity_bytes()
  std::size_t in_item_bytes = 0;
};

class Ring {
 public:
  struct Parts {
    net::Proxy* proxy = nullptr;
    net::RingWords* words = nullptr;
    int peer = 0;       ///< index of the peer in the proxy
    int peer_rank = 0;  ///< in the group, for messages
    const std::byte* chunks_in = nullptr;
    std::byte* chunks_out = nullptr;
    RingShape shape;
  };
  explicit Ring(const Parts& parts) : parts_(parts) {}

  /// Starts the next exchange; the previous one must be finished. Both ends make the same exchanges in the same order.
  void begin(const Flow& flow);

  /// Room for the items [first, first + num_items) of the exchange, to be written one after the other at `to`, which is
  /// aligned to 16 bytes. No items: all are committed, or the peer must use a chunk first.
  struct Batch {
    std::int64_t first = 0;
    std::int64_t num_items = 0;
    std::byte* to = nullptr;
  };
  Batch reserve() const;
  /// Sends a batch as one chunk.
  void commit(const Batch& batch);

  /// Arrived items that were not released yet: whole items, in order, aligned to 16 bytes. Also empty if the peer
  /// violated the protocol (see fault()).
  std::span<const std::byte> front();
  /// Marks the first `num_items` items of front() as used.
  void release(std::int64_t num_items);

  /// True if all items of this exchange are committed and released.
  bool finished() const { return num_committed_ == flow_.num_out && reader_.all_used(); }
  /// Error if the peer violated the protocol; the exchange cannot continue then.
  const Status& fault() const { return fault_; }

  std::size_t capacity_bytes() const { return parts_.shape.chunk_bytes - kChunkHeaderBytes; }
  int peer_rank() const { return parts_.peer_rank; }

 private:
  /// Bytes of items in a chunk of this exchange; more for a single item that is longer.
  std::size_t exchange_capacity() const;
  std::size_t chunk_offset(std::uint64_t chunk_idx) const {
    return chunk_idx % parts_.shape.num_chunks * parts_.shape.chunk_bytes;
  }

  Parts parts_;
  Flow flow_;
  std::uint64_t exchange_idx_ = 0;
  std::int64_t num_committed_ = 0;  // items of this exchange
  std::uint64_t num_filled_ = 0;    // chunks since creation
  std::uint64_t num_used_ = 0;      // chunks since creation
  ChunkReader reader_;
  Status fault_;
};

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RING_HPP
