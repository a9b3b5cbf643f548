#ifndef FERRY_RAIL_CHUNK_READER_HPP
#define FERRY_RAIL_CHUNK_READER_HPP

/// Arrivals from one rail peer in one exchange: items in chunks, whose number and size both ends know beforehand. The
/// peer can write to a chunk at any moment, so its header is read once; afterwards only the contents of items, which
/// the caller handles, depend on the chunk's memory.

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/status.hpp"

namespace ferry::rail {

class ChunkReader {
 public:
  struct Agreed {
    std::uint64_t exchange_idx = 0;
    std::int64_t num_items = 0;
    std::size_t item_bytes = 0;  ///< at least 1 if there are items
  };
  ChunkReader() = default;
  explicit ChunkReader(const Agreed& agreed) : agreed_(agreed) {}

  /// Opens the bytes, at least a header, as chunk number `chunk_idx` of the ring. Accepts any bytes, which must stay in
  /// place until all their items are used. After a refusal it expects the same chunk.
  /// @pre  no chunk is open, and not all items are used
  /// @errors kTransport; the message completes "rank 3 sent …"
  Status open(std::span<const std::byte> chunk, std::uint64_t chunk_idx);
  bool is_open() const { return chunk_left_ > 0; }

  /// Unused whole items of the open chunk; empty if no chunk is open.
  std::span<const std::byte> front() const {
    return {items_, static_cast<std::size_t>(chunk_left_) * agreed_.item_bytes};
  }
  /// Marks the first `count` items of front() as used. True: the chunk is used up.
  bool pop(std::int64_t count);

  bool all_used() const { return num_used_ == agreed_.num_items; }

 private:
  Agreed agreed_;
  std::int64_t num_used_ = 0;
  std::int64_t chunk_left_ = 0;  // items of the open chunk; 0: no chunk is open
  const std::byte* items_ = nullptr;
};

}  // namespace ferry::rail

#endif  // FERRY_RAIL_CHUNK_READER_HPP
