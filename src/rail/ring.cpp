#include "rail/ring.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace ferry::rail {
namespace {

using Word = std::atomic_ref<std::uint64_t>;

}  // namespace

void Ring::begin(const Flow& flow) {
  flow_ = flow;
  ++exchange_idx_;
  num_committed_ = 0;
  // Kernels may have used the rings since the last exchange.
  num_filled_ = Word(parts_.words->num_filled).load(std::memory_order_relaxed);
  num_used_ = Word(parts_.words->num_used).load(std::memory_order_relaxed);
  reader_ = ChunkReader({exchange_idx_, flow.num_in, flow.in_item_bytes});
}

Ring::Batch Ring::reserve() const {
  const std::int64_t left = flow_.num_out - num_committed_;
  if (left == 0) return {};
  // A false credit from the peer only corrupts the data that the peer receives.
  const std::uint64_t credits = Word(parts_.words->credits).load(std::memory_order_acquire);
  if (static_cast<std::int64_t>(credits + parts_.shape.num_chunks - num_filled_) <= 0) return {};
  const auto most = std::max<std::int64_t>(static_cast<std::int64_t>(exchange_capacity() / flow_.out_item_bytes), 1);
  return {num_committed_, std::min(left, most), parts_.chunks_out + chunk_offset(num_filled_) + kChunkHeaderBytes};
}

std::size_t Ring::exchange_capacity() const {
  const std::size_t exchange_bytes = static_cast<std::size_t>(flow_.num_out) * flow_.out_item_bytes;
  return exchange_chunk_bytes(parts_.shape.chunk_bytes, exchange_bytes) - kChunkHeaderBytes;
}

void Ring::commit(const Batch& batch) {
  const ChunkHeader header{.chunk_idx = num_filled_,
                           .exchange_idx = exchange_idx_,
                           .num_items = static_cast<std::uint32_t>(batch.num_items),
                           .item_bytes = static_cast<std::uint32_t>(flow_.out_item_bytes)};
  std::memcpy(batch.to - kChunkHeaderBytes, &header, sizeof(header));
  const std::size_t num_bytes = kChunkHeaderBytes + std::size_t{header.num_items} * header.item_bytes;
  num_committed_ += batch.num_items;
  const std::uint64_t word = net::filled_word(num_filled_, static_cast<std::uint32_t>(num_bytes));
  Word(parts_.words->filled[num_filled_ % parts_.shape.num_chunks]).store(word, std::memory_order_seq_cst);
  Word(parts_.words->num_filled).store(++num_filled_, std::memory_order_relaxed);
  parts_.proxy->post_ring(parts_.peer);
}

std::span<const std::byte> Ring::front() {
  if (!fault_.ok() || reader_.all_used()) return {};
  if (reader_.is_open()) return reader_.front();
  if (Word(parts_.words->arrived).load(std::memory_order_acquire) <= num_used_) return {};
  const std::byte* const chunk = parts_.chunks_in + chunk_offset(num_used_);
  if (Status status = reader_.open({chunk, parts_.shape.chunk_bytes}, num_used_); !status.ok()) {
    fault_ =
        Status(status.code(), fmt::format("rank {} sent {}", parts_.peer_rank, status.message()), parts_.peer_rank);
  }
  return reader_.front();
}

void Ring::release(std::int64_t num_items) {
  if (!reader_.pop(num_items)) return;
  const std::size_t slot = num_used_ % parts_.shape.num_chunks;
  Word(parts_.words->used[slot]).store(++num_used_, std::memory_order_seq_cst);
  Word(parts_.words->num_used).store(num_used_, std::memory_order_relaxed);
  parts_.proxy->post_ring(parts_.peer);
}

}  // namespace ferry::rail
