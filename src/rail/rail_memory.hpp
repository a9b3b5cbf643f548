#ifndef FERRY_RAIL_RAIL_MEMORY_HPP
#define FERRY_RAIL_RAIL_MEMORY_HPP

/// Memory of a rank that its rail peers (the ranks with its index in the other nodes) put into, and that it puts from.
/// All ranks of a group use the same layout, so offsets are valid on both ends.
///
///     headers in     2 x M records   call of each rail peer; consecutive calls alternate
///     headers out    2 records       call of this rank
///     errors in      M records       reason for which a rail peer gave up on the group
///     error out      1 record
///     chunks in      M rings         received payload, by sending node
///     chunks out     M rings         the same on the sender's side: a chunk stays until the receiver has used it
///
/// Chunks are large on few nodes, and shrink on more so that all rings together stay within a budget.

#include <cstddef>
#include <cstdint>

#include "net/ring_words.hpp"
#include "plan/carver.hpp"
#include "plan/host_device.hpp"

namespace ferry::rail {

/// Number of chunks of a ring, and their size including the chunk's header.
struct RingShape {
  std::size_t num_chunks = 0;   ///< at most net::kMaxRingChunks
  std::size_t chunk_bytes = 0;  ///< a multiple of plan::kPartAlignment
};

/// Memory budget for all rings of a CPU rank (up to about a thousand nodes; beyond that every ring has its smallest
/// size).
inline constexpr std::size_t kRingBudgetBytes = std::size_t{64} << 20;
/// For CPUs: one chunk being filled, one being used, two in transit.
inline constexpr std::size_t kNumChunks = 4;
/// Long enough to amortise a put's fixed costs, short enough that both ends of a ring fit a core's second-level cache.
/// Through UCX's shared memory, 8 ranks on 2 cores, the rings carried 1.12 to 1.39 times the rate of ucx_perftest with
/// this size and 0.85 to 0.95 times with twice it (benchmarks/nodes.py, three runs of each in turn); over TCP whole
/// calls took equally long with both.
inline constexpr std::size_t kMaxChunkBytes = std::size_t{128} << 10;
inline constexpr std::size_t kMinChunkBytes = std::size_t{8} << 10;

/// Precedes each chunk. The receiver checks every field.
struct ChunkHeader {
  std::uint64_t chunk_idx = 0;     ///< number of the chunk in the ring, from 0, never repeated
  std::uint64_t exchange_idx = 0;  ///< number of the exchange between the two ranks, from 1
  std::uint32_t num_items = 0;
  std::uint32_t item_bytes = 0;
};
inline constexpr std::size_t kChunkHeaderBytes = 64;
static_assert(sizeof(ChunkHeader) <= kChunkHeaderBytes);

/// For kernels: 1 MB or more is in flight to a peer (50 GB/s for 20 us), and as much is being written.
inline constexpr std::size_t kNumKernelChunks = 16;
/// With four blocks at each end, an H200 fills a ring in host memory and empties another at 16.5 GB/s each way with
/// chunks of 128 KiB, 25.2 with 256 KiB and 26.5 with 512 KiB; with one block, as for many peers, at 7.2, 9.9 and 12.0
/// (benchmarks/gpu_rings).
inline constexpr std::size_t kMaxKernelChunkBytes = std::size_t{512} << 10;
/// Chunks have the maximum size on up to nine nodes.
inline constexpr std::size_t kKernelRingBudgetBytes = std::size_t{128} << 20;
/// The same for rings in GPU memory. With four blocks at each end an H200 fills and empties them at 89 GB/s each way
/// with chunks of 512 KiB and at 97 with 1 MiB, with one block at 24.7 and 28.2 (benchmarks/gpu_rings --gpu-memory);
/// and the host works half as often.
inline constexpr std::size_t kMaxGpuChunkBytes = std::size_t{1} << 20;
inline constexpr std::size_t kGpuRingBudgetBytes = std::size_t{256} << 20;

/// Minimum number of chunks in an exchange, if it is large enough: both ends and the network then work at once, and
/// several blocks of a kernel at each end.
inline constexpr std::size_t kLeastExchangeChunks = 16;

/// Maximum bytes of a chunk in an exchange, including its header, in a ring with chunks of `chunk_bytes`: rings of GPU
/// ranks have larger chunks than short exchanges should use.
FERRY_HOST_DEVICE constexpr std::size_t exchange_chunk_bytes(std::size_t chunk_bytes, std::size_t exchange_bytes) {
  const std::size_t share = exchange_bytes / kLeastExchangeChunks / plan::kPartAlignment * plan::kPartAlignment;
  const std::size_t wanted = share > kMaxChunkBytes ? share : kMaxChunkBytes;
  return wanted < chunk_bytes ? wanted : chunk_bytes;
}

/// Chunk size between kMinChunkBytes and `most_bytes` that keeps all rings of a rank within `budget_bytes`.
constexpr RingShape ring_shape_within(std::size_t budget_bytes, std::size_t num_nodes, std::size_t num_chunks,
                                      std::size_t most_bytes) {
  const std::size_t num_rings = num_nodes > 1 ? 2 * (num_nodes - 1) : 1;
  const std::size_t share = budget_bytes / (num_rings * num_chunks) / plan::kPartAlignment * plan::kPartAlignment;
  return {num_chunks, share < kMinChunkBytes ? kMinChunkBytes : share > most_bytes ? most_bytes : share};
}

/// Rings of CPU ranks in a group of `num_nodes`.
constexpr RingShape default_ring_shape(std::size_t num_nodes) {
  return ring_shape_within(kRingBudgetBytes, num_nodes, kNumChunks, kMaxChunkBytes);
}
/// Rings of GPU ranks, whose ends are kernels.
constexpr RingShape kernel_ring_shape(std::size_t num_nodes) {
  return ring_shape_within(kKernelRingBudgetBytes, num_nodes, kNumKernelChunks, kMaxKernelChunkBytes);
}

/// Those whose chunks are in GPU memory.
constexpr RingShape gpu_ring_shape(std::size_t num_nodes) {
  return ring_shape_within(kGpuRingBudgetBytes, num_nodes, kNumKernelChunks, kMaxGpuChunkBytes);
}

static_assert(default_ring_shape(2).chunk_bytes == kMaxChunkBytes && default_ring_shape(1000).chunk_bytes == 8384);
static_assert(kernel_ring_shape(9).chunk_bytes == kMaxKernelChunkBytes && kernel_ring_shape(32).chunk_bytes == 135'296);

class RailMemory {
 public:
  struct Shape {
    std::size_t num_nodes = 1;
    std::size_t header_bytes = 0;
    std::size_t error_bytes = 0;
    RingShape ring;
  };

  /// Pointers into `base`; with a null base only sizes and offsets are valid.
  RailMemory(std::byte* base, const Shape& shape) : base_(base), num_nodes_(shape.num_nodes), ring_(shape.ring) {
    plan::Carver carver(nullptr);
    const auto part = [&carver](std::size_t bytes) {
      const std::size_t offset = carver.used_bytes();
      carver.take<std::byte>(bytes);
      return offset;
    };
    header_stride_ = round_up(shape.header_bytes);
    error_stride_ = round_up(shape.error_bytes);
    headers_in_ = part(2 * num_nodes_ * header_stride_);
    headers_out_ = part(2 * header_stride_);
    errors_in_ = part(num_nodes_ * error_stride_);
    error_out_ = part(error_stride_);
    // A node has no ring with itself.
    chunks_in_ = part((num_nodes_ - 1) * ring_bytes());
    chunks_out_ = part((num_nodes_ - 1) * ring_bytes());
    size_bytes_ = carver.used_bytes();
  }

  std::size_t size_bytes() const { return size_bytes_; }
  const RingShape& ring_shape() const { return ring_; }
  std::size_t ring_bytes() const { return ring_.num_chunks * ring_.chunk_bytes; }
  std::size_t rings_bytes() const { return 2 * (num_nodes_ - 1) * ring_bytes(); }
  std::byte* at(std::size_t offset) const { return base_ + offset; }

  /// Offset of the header of `from` on a receiver, for calls of this parity; headers of one parity are adjacent, by
  /// node.
  std::size_t header_in(std::size_t parity, std::size_t from) const {
    return headers_in_ + (parity * num_nodes_ + from) * header_stride_;
  }
  std::size_t header_out(std::size_t parity) const { return headers_out_ + parity * header_stride_; }
  std::size_t header_stride() const { return header_stride_; }
  std::size_t error_in(std::size_t from) const { return errors_in_ + from * error_stride_; }
  std::size_t error_out() const { return error_out_; }

  std::size_t chunks_in() const { return chunks_in_; }
  std::size_t chunks_out() const { return chunks_out_; }
  /// Offset of the ring from `from` on the receiver `to`, and of the ring to `to` on the sender `from`.
  std::size_t ring_in(std::size_t from, std::size_t to) const { return chunks_in_ + ring_idx(from, to) * ring_bytes(); }
  std::size_t ring_out(std::size_t from, std::size_t to) const {
    return chunks_out_ + ring_idx(to, from) * ring_bytes();
  }

 private:
  static constexpr std::size_t round_up(std::size_t bytes) {
    return (bytes + plan::kPartAlignment - 1) / plan::kPartAlignment * plan::kPartAlignment;
  }
  /// Index of the ring with `other` on `owner`; the owner itself has none.
  static std::size_t ring_idx(std::size_t other, std::size_t owner) { return other < owner ? other : other - 1; }

  std::byte* base_;
  std::size_t num_nodes_;
  RingShape ring_;
  std::size_t header_stride_ = 0;
  std::size_t error_stride_ = 0;
  std::size_t headers_in_ = 0;
  std::size_t headers_out_ = 0;
  std::size_t errors_in_ = 0;
  std::size_t error_out_ = 0;
  std::size_t chunks_in_ = 0;
  std::size_t chunks_out_ = 0;
  std::size_t size_bytes_ = 0;
};

}  // namespace ferry::rail

#endif  // FERRY_RAIL_RAIL_MEMORY_HPP
