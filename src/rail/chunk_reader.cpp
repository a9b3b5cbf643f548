#include "rail/chunk_reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "rail/rail_memory.hpp"

namespace ferry::rail {

Status ChunkReader::open(std::span<const std::byte> chunk, std::uint64_t chunk_idx) {
  ChunkHeader header;
  std::memcpy(&header, chunk.data(), sizeof(header));
  const std::size_t room = (chunk.size() - kChunkHeaderBytes) / agreed_.item_bytes;
  const std::int64_t most = std::min(agreed_.num_items - num_used_, static_cast<std::int64_t>(room));
  if (header.chunk_idx == chunk_idx && header.exchange_idx == agreed_.exchange_idx &&
      header.item_bytes == agreed_.item_bytes && header.num_items > 0 && header.num_items <= most) {
    chunk_left_ = header.num_items;
    items_ = chunk.data() + kChunkHeaderBytes;
    return {};
  }
  return Status(ErrorCode::kTransport,
                fmt::format("an unexpected chunk: chunk {} of exchange {} with {} items of {} bytes, "
                            "expected chunk {} of exchange {} with 1 to {} items of {} bytes",
                            header.chunk_idx, header.exchange_idx, header.num_items, header.item_bytes, chunk_idx,
                            agreed_.exchange_idx, most, agreed_.item_bytes));
}

bool ChunkReader::pop(std::int64_t count) {
  num_used_ += count;
  chunk_left_ -= count;
  items_ += static_cast<std::size_t>(count) * agreed_.item_bytes;
  return chunk_left_ == 0;
}

}  // namespace ferry::rail
