#ifndef FERRY_CUDA_INTERNODE_RAIL_RING_CUH
#define FERRY_CUDA_INTERNODE_RAIL_RING_CUH

/// Ends of a rail's rings, shared by the blocks of an exchange. Blocks take chunks in turn, so that several chunks are
/// written and read at the same time, and fill and use them in any order; what arrived is reported in order.

#include "cuda/internode/chunk_division.hpp"
#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/rail_wait.cuh"
#include "cuda/sync/ring.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "rail/rail_memory.hpp"

namespace ferry::cuda::device {

/// Offset that separates the numbers of kernels' exchanges from those of hosts' exchanges, which use the same rings.
inline constexpr std::uint64_t kDeviceExchange = std::uint64_t{1} << 63;

/// Shared memory of a block.
struct Shared {
  std::byte* chunk;  ///< the chunk being written or read; null: the group broke
  std::uint64_t outcome;
};

__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(dynamic_shared()); }

/// Number of an exchange's first chunk with items: the announcement of a call may be before them.
__device__ inline std::uint64_t first_item_chunk(const ExchangeParams& params) {
  return params.begins_call && !params.rails.has_call_rings() ? 1 : 0;
}

/// The end of a ring that a block serves.
struct RingEnd {
  const RailRings& rings;
  RingTurn* turns;  ///< [nodes]
  int peer;
  int worker;             ///< number of the block among those that serve the end
  bool is_shared = true;  ///< hosts use the ring too
};

/// One of the blocks that serve a ring. Used by thread 0.
class RingWorker {
 public:
  __device__ RingWorker(const ExchangeParams& params, const RingEnd& end, std::uint64_t exchange)
      : params_(params),
        turn_(end.turns[end.peer]),
        exchange_(exchange),
        leads_(end.worker == 0),
        is_shared_(end.is_shared) {}

  /// Finds where the exchange begins in the ring, at the first call; only the first block does. Where hosts use the
  /// ring too, that and how far the peer is come over PCIe, 5 us on an H200. False if the group broke.
  template <typename Ring>
  __device__ bool open(Ring& ring) {
    if (is_open_) return true;
    if (leads_) {
      first_ = is_shared_ ? ring.find() : turn_.first + turn_.num_done;
      if (is_shared_) turn_.seen = ring.look();
      turn_.first = first_;
      turn_.num_done = 0;
      turn_.turn = first_ + first_item_chunk(params_);
      store_release_device(&turn_.exchange, exchange_);
      is_open_ = true;
    } else {
      is_open_ = wait_word(&turn_.exchange, exchange_);
      if (is_open_) first_ = *static_cast<const volatile std::uint64_t*>(&turn_.first);
    }
    return is_open_;
  }
  /// Checks whether the next chunk of the ring can be written, or read. Usually one block, whose chunk is first, polls
  /// over PCIe and shares the result: many pollers would slow each other and the chunks in transit.
  template <typename Ring>
  __device__ void look(Ring& ring) {
    ring.see(load_acquire_device(&turn_.seen));
    // The block whose chunk is first may be busy with its previous chunk.
    if (ring.is_ready() || (!ring.is_first_missing() && ++num_looks_ % kLooksPerLook != 0)) return;
    const std::uint64_t seen = ring.look();
    if (seen == ring.seen()) return;
    ring.see(seen);
    store_release_device(&turn_.seen, seen);
  }
  /// Number in the ring of a chunk of the exchange.
  __device__ std::uint64_t number_of(std::uint64_t chunk_idx) const { return first_ + chunk_idx; }
  /// Counts a chunk that this block has filled or used.
  __device__ void count() { add_relaxed_device(&turn_.num_done, 1); }
  /// Waits until the items of all lower chunks are reported; false if the group broke.
  __device__ bool await_turn(std::uint64_t number) const { return wait_word(&turn_.turn, number); }
  /// Signals that the items of all lower chunks are reported.
  __device__ void pass_turn(std::uint64_t number) { store_release_device(&turn_.turn, number); }

 private:
  static constexpr unsigned kLooksPerLook = 16;

  __device__ bool wait_word(const std::uint64_t* word, std::uint64_t expected) const {
    return wait_until(
        params_.ranks, {Awaited::kOwn, params_.ranks.rank, exchange_}, [word] { return load_acquire_device(word); },
        expected);
  }

  const ExchangeParams& params_;
  RingTurn& turn_;
  std::uint64_t exchange_;
  std::uint64_t first_ = 0;
  unsigned num_looks_ = 0;
  bool leads_;
  bool is_shared_;
  bool is_open_ = false;
};

/// A block that sends to a peer. Thread 0 holds its state; all threads of the block call its functions.
class Sender {
 public:
  __device__ Sender(const ExchangeParams& params, const RingEnd& end, std::uint64_t exchange)
      : params_(params),
        peer_(end.peer),
        exchange_(exchange),
        worker_(params, end, exchange),
        ring_(end.rings.words + end.peer, end.rings.chunks_out + params.rails.ring_offset(end.rings, end.peer),
              end.rings.num_chunks, end.rings.chunk_bytes) {}

  /// Returns the memory for the items of chunk `chunk_idx` of the exchange; null if the group broke.
  __device__ __noinline__ std::byte* reserve(std::uint64_t chunk_idx) {
    __syncthreads();  // all threads have read the previous value
    if (threadIdx.x == 0) {
      std::byte* chunk = nullptr;
      bool here = worker_.open(ring_);
      if (here) {
        ring_.seek(worker_.number_of(chunk_idx));
        here = wait_rail(params_, {Awaited::kRailRoom, peer_, exchange_}, ring_, [this, &chunk] {
          worker_.look(ring_);
          chunk = ring_.next();
          return chunk != nullptr;
        });
      }
      shared().chunk = here ? chunk + rail::kChunkHeaderBytes : nullptr;
    }
    __syncthreads();
    return shared().chunk;
  }

  __device__ __noinline__ void commit(std::int64_t num_items, std::int64_t item_bytes) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    auto* header = reinterpret_cast<rail::ChunkHeader*>(shared().chunk - rail::kChunkHeaderBytes);
    header->chunk_idx = ring_.chunk_idx();
    header->exchange_idx = kDeviceExchange | exchange_;
    header->num_items = static_cast<std::uint32_t>(num_items);
    header->item_bytes = static_cast<std::uint32_t>(item_bytes);
    ring_.commit(static_cast<std::uint32_t>(rail::kChunkHeaderBytes + num_items * item_bytes));
    worker_.count();
  }

 private:
  const ExchangeParams& params_;
  int peer_;
  std::uint64_t exchange_;
  RingWorker worker_;
  SendRing ring_;
};

/// A block that receives from a peer; threads as in Sender.
class Receiver {
 public:
  static constexpr std::int64_t kAny = -1;

  __device__ Receiver(const ExchangeParams& params, const RingEnd& end, std::uint64_t exchange)
      : params_(params),
        peer_(end.peer),
        exchange_(exchange),
        worker_(params, end, exchange),
        ring_(end.rings.words + end.peer, end.rings.chunks_in + params.rails.ring_offset(end.rings, end.peer),
              end.rings.num_chunks, end.rings.chunk_bytes) {}

  /// Returns the items of chunk `chunk_idx` of the exchange, which must be `num_items` of `item_bytes`, or any if that
  /// is kAny; null if the group broke.
  __device__ __noinline__ const std::byte* front(std::uint64_t chunk_idx, Awaited awaited, std::int64_t num_items,
                                                 std::int64_t item_bytes) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const std::byte* chunk = nullptr;
      bool here = worker_.open(ring_);
      if (here) {
        ring_.seek(worker_.number_of(chunk_idx));
        here = wait_rail(params_, {awaited, peer_, exchange_}, ring_, [this, &chunk] {
          worker_.look(ring_);
          chunk = ring_.next();
          return chunk != nullptr;
        });
      }
      if (here && !is_expected(chunk, num_items, item_bytes)) {
        declare_lost(params_.ranks, {Awaited::kRailProtocol, peer_, exchange_}, {ring_.chunk_idx(), exchange_, false});
        here = false;
      }
      shared().chunk = here ? const_cast<std::byte*>(chunk) + rail::kChunkHeaderBytes : nullptr;
    }
    __syncthreads();
    return shared().chunk;
  }

  __device__ __noinline__ void release() {
    __syncthreads();
    if (threadIdx.x == 0) release_chunk();
  }

  /// Releases a chunk with items, as all of the exchange, and reports in turn: `arrived`, unless null, is set to
  /// `count`, which publishes that the items of this chunk and of the previous ones arrived.
  __device__ __noinline__ void release_in_turn(std::uint64_t* arrived, std::uint64_t count) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    const std::uint64_t number = ring_.chunk_idx();
    release_chunk();
    if (!worker_.await_turn(number)) return;
    if (arrived != nullptr) store_release_system(arrived, count);
    worker_.pass_turn(number + 1);
  }

 private:
  __device__ void release_chunk() {
    ring_.release();
    worker_.count();
  }
  /// All fields are loaded before any is compared, because each load goes over PCIe.
  __device__ bool is_expected(const std::byte* chunk, std::int64_t num_items, std::int64_t item_bytes) const {
    const auto& header = *reinterpret_cast<const volatile rail::ChunkHeader*>(chunk);
    const std::uint64_t chunk_idx = header.chunk_idx;
    const std::uint64_t exchange_idx = header.exchange_idx;
    const std::uint32_t num_there = header.num_items;
    const std::uint32_t bytes_there = header.item_bytes;
    if (chunk_idx != ring_.chunk_idx() || exchange_idx != (kDeviceExchange | exchange_)) return false;
    return item_bytes == kAny || (num_there == static_cast<std::uint32_t>(num_items) &&
                                  bytes_there == static_cast<std::uint32_t>(item_bytes));
  }

  const ExchangeParams& params_;
  int peer_;
  std::uint64_t exchange_;
  RingWorker worker_;
  ReceiveRing ring_;
};

/// Division of `num_items` items. `chunk_items`: as ChunkDivision::Params.
__device__ inline ChunkDivision division_of(const ExchangeParams& params, std::int64_t num_items, int chunk_items) {
  return ChunkDivision({num_items, params.item_bytes(), params.rails.rings.chunk_bytes, chunk_items});
}

/// Division of the items that this rank sends a peer.
__device__ inline ChunkDivision sent_division(const ExchangeParams& params, int peer) {
  return division_of(params, params.flows[peer].num_out, params.carries_rows ? params.chunk_items : 0);
}

/// Calls `move(ItemChunk)` for each of `worker`'s chunks, until it returns false.
template <typename Move>
__device__ void for_each_chunk(const ExchangeParams& params, const ChunkDivision& division, int worker, Move move) {
  const std::int64_t num_chunks = division.num_chunks();
#pragma unroll 1
  for (std::int64_t i = worker; i < num_chunks; i += params.blocks_per_ring) {
    if (!move(division.at(i))) return;
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_RAIL_RING_CUH
