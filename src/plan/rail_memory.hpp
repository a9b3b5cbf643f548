#ifndef FERRY_PLAN_RAIL_MEMORY_HPP
#define FERRY_PLAN_RAIL_MEMORY_HPP

/// The memory of a rank that its rail peers (the ranks with its index in the other nodes) put into, and out of which it
/// puts. All ranks of a group lay it out alike, so an offset here is an offset there.
///
///     calls in       2 x M records   what each rail peer says of the current call; calls alternate
///     calls out      2 records       what this rank says
///     verdicts in    M records       why a rail peer gave up on the group
///     verdict out    1 record
///     chunks in      M rings         bytes on their way, by sending node
///     chunks out     M rings         the same on the sender's side: a chunk stays until the receiver has used it
///
/// Chunks are few and large where there are few nodes, and shrink so that all rings together keep to a budget.

#include <cstddef>
#include <cstdint>

#include "plan/carver.hpp"

namespace ferry::plan {

/// What all rings of a rank take at most (up to about a thousand nodes; then every ring has its smallest size).
inline constexpr std::size_t kRingBudgetBytes = std::size_t{64} << 20;
/// Chunks of a ring: one being filled, one used up, two on their way.
inline constexpr std::size_t kNumChunks = 4;
/// Long enough that a put's fixed costs vanish, short enough that both ends of a ring fit a core's second-level cache.
/// Through UCX's shared memory, 8 ranks on 2 cores, the rings carried 1.12 to 1.39 of what ucx_perftest did with this
/// size and 0.85 to 0.95 with twice it (benchmarks/nodes.py, three runs of each in turn); over TCP whole calls took as
/// long with either.
inline constexpr std::size_t kMaxChunkBytes = std::size_t{128} << 10;
inline constexpr std::size_t kMinChunkBytes = std::size_t{8} << 10;

/// In front of each chunk. The receiver checks all of it.
struct ChunkHeader {
  std::uint64_t chunk_idx = 0;     ///< of the ring, from 0, never repeated
  std::uint64_t exchange_idx = 0;  ///< which exchange of the pair of ranks, from 1
  std::uint32_t num_items = 0;
  std::uint32_t item_bytes = 0;
};
inline constexpr std::size_t kChunkHeaderBytes = 64;
static_assert(sizeof(ChunkHeader) <= kChunkHeaderBytes);

/// Bytes of a chunk, header included, in a group of `num_nodes`.
FERRY_HOST_DEVICE constexpr std::size_t chunk_bytes(std::size_t num_nodes) {
  const std::size_t num_rings = num_nodes > 1 ? 2 * (num_nodes - 1) : 1;
  const std::size_t share = kRingBudgetBytes / (num_rings * kNumChunks) / kPartAlignment * kPartAlignment;
  return share < kMinChunkBytes ? kMinChunkBytes : share > kMaxChunkBytes ? kMaxChunkBytes : share;
}

static_assert(chunk_bytes(2) == kMaxChunkBytes && chunk_bytes(1000) == 8384);

class RailMemory {
 public:
  struct Shape {
    std::size_t num_nodes = 1;
    std::size_t call_bytes = 0;
    std::size_t verdict_bytes = 0;
  };

  /// Pointers into `base`; with a null base only sizes and offsets.
  RailMemory(std::byte* base, const Shape& shape) : base_(base), chunk_bytes_(plan::chunk_bytes(shape.num_nodes)) {
    Carver carver(nullptr);
    const auto part = [&carver](std::size_t bytes) {
      const std::size_t offset = carver.used_bytes();
      carver.take<std::byte>(bytes);
      return offset;
    };
    call_stride_ = round_up(shape.call_bytes);
    verdict_stride_ = round_up(shape.verdict_bytes);
    num_nodes_ = shape.num_nodes;
    calls_in_ = part(2 * num_nodes_ * call_stride_);
    calls_out_ = part(2 * call_stride_);
    verdicts_in_ = part(num_nodes_ * verdict_stride_);
    verdict_out_ = part(verdict_stride_);
    // A node has no ring with itself.
    const std::size_t rings_bytes = (num_nodes_ - 1) * kNumChunks * chunk_bytes_;
    chunks_in_ = part(rings_bytes);
    chunks_out_ = part(rings_bytes);
    size_bytes_ = carver.used_bytes();
  }

  std::size_t size_bytes() const { return size_bytes_; }
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  std::size_t rings_bytes() const { return 2 * (num_nodes_ - 1) * kNumChunks * chunk_bytes_; }
  std::byte* at(std::size_t offset) const { return base_ + offset; }

  /// Where `from`'s record of a call of this parity lies on a receiver; all of a parity lie beside each other, by node.
  std::size_t call_in(std::size_t parity, std::size_t from) const {
    return calls_in_ + (parity * num_nodes_ + from) * call_stride_;
  }
  std::size_t call_out(std::size_t parity) const { return calls_out_ + parity * call_stride_; }
  std::size_t call_stride() const { return call_stride_; }
  std::size_t verdict_in(std::size_t from) const { return verdicts_in_ + from * verdict_stride_; }
  std::size_t verdict_out() const { return verdict_out_; }

  /// Chunk of the ring from `from` on the receiver `to`, and of the ring towards `to` on the sender `from`.
  std::size_t chunk_in(std::size_t from, std::size_t to, std::uint64_t chunk_idx) const {
    return chunks_in_ + chunk(ring(from, to), chunk_idx);
  }
  std::size_t chunk_out(std::size_t from, std::size_t to, std::uint64_t chunk_idx) const {
    return chunks_out_ + chunk(ring(to, from), chunk_idx);
  }

 private:
  static constexpr std::size_t round_up(std::size_t bytes) {
    return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  }
  /// Number of the ring with `other` on `owner`, which skips the owner itself.
  static std::size_t ring(std::size_t other, std::size_t owner) { return other < owner ? other : other - 1; }
  std::size_t chunk(std::size_t ring, std::uint64_t chunk_idx) const {
    return (ring * kNumChunks + chunk_idx % kNumChunks) * chunk_bytes_;
  }

  std::byte* base_;
  std::size_t num_nodes_ = 1;
  std::size_t chunk_bytes_;
  std::size_t call_stride_ = 0;
  std::size_t verdict_stride_ = 0;
  std::size_t calls_in_ = 0;
  std::size_t calls_out_ = 0;
  std::size_t verdicts_in_ = 0;
  std::size_t verdict_out_ = 0;
  std::size_t chunks_in_ = 0;
  std::size_t chunks_out_ = 0;
  std::size_t size_bytes_ = 0;
};

}  // namespace ferry::plan

#endif  // FERRY_PLAN_RAIL_MEMORY_HPP
