#ifndef FERRY_CUDA_SYNC_RING_CUH
#define FERRY_CUDA_SYNC_RING_CUH

/// Ends of a ring between nodes, for kernels: the device's counterpart of rail::Ring, on the same words
/// (net/ring_words.hpp), which must be in pinned host memory. No function here waits. One thread of a block calls them;
/// a barrier orders the block's other threads with it. Several blocks may serve one ring, each with its own end: each
/// takes chunks with different numbers (seek).
///
/// Reading a word goes over PCIe, so its value is kept and shared among blocks (see): the words only grow. An end
/// begins at chunk 0; find() or seek() moves it to where the ring is.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/flags.cuh"
#include "net/ring_words.hpp"

namespace ferry::cuda::device {

/// The sender's end.
class SendRing {
 public:
  __device__ SendRing(net::RingWords* words, std::byte* chunks, std::uint64_t num_chunks, std::uint64_t chunk_bytes)
      : words_(words), chunks_(chunks), num_chunks_(num_chunks), chunk_bytes_(chunk_bytes) {}

  /// Moves to the first chunk that is not filled, and returns its number.
  __device__ std::uint64_t find() { return chunk_idx_ = words_->num_filled; }
  /// Destination of the next chunk; null until the peer has used an earlier chunk.
  __device__ std::byte* reserve() {
    if (!is_ready()) see(look());
    return next();
  }
  /// Variant of reserve() that loads no word over PCIe.
  __device__ std::byte* next() const { return is_ready() ? chunks_ + slot() * chunk_bytes_ : nullptr; }
  __device__ bool is_ready() const { return ahead() > 0; }
  /// Whether the next chunk is the first one without room.
  __device__ bool is_first_missing() const { return ahead() == 0; }
  /// Number of chunks that the peer has used; loads the proxy's word over PCIe.
  __device__ std::uint64_t look() const { return load_acquire_system(&words_->credits); }
  __device__ void see(std::uint64_t credits) { credits_ = credits; }
  /// Sends the reserved chunk, of which `num_bytes` are written, once those before it are sent.
  __device__ void commit(std::uint32_t num_bytes) {
    fence_system();
    store_relaxed_system(&words_->filled[slot()], net::filled_word(chunk_idx_, num_bytes));
    ++chunk_idx_;
  }
  /// Number of the next chunk.
  __device__ std::uint64_t chunk_idx() const { return chunk_idx_; }
  __device__ void seek(std::uint64_t chunk_idx) { chunk_idx_ = chunk_idx; }
  /// Number of chunks that the peer has used, as this end saw last.
  __device__ std::uint64_t seen() const { return credits_; }

 private:
  __device__ std::uint64_t slot() const { return chunk_idx_ % num_chunks_; }
  __device__ std::int64_t ahead() const { return static_cast<std::int64_t>(credits_ + num_chunks_ - chunk_idx_); }

  net::RingWords* words_;
  std::byte* chunks_;
  std::uint64_t num_chunks_;
  std::uint64_t chunk_bytes_;
  std::uint64_t chunk_idx_ = 0;
  std::uint64_t credits_ = 0;
};

/// The receiver's end.
class ReceiveRing {
 public:
  __device__ ReceiveRing(net::RingWords* words, const std::byte* chunks, std::uint64_t num_chunks,
                         std::uint64_t chunk_bytes)
      : words_(words), chunks_(chunks), num_chunks_(num_chunks), chunk_bytes_(chunk_bytes) {}

  /// Moves to the oldest chunk that is not used, and returns its number.
  __device__ std::uint64_t find() { return chunk_idx_ = words_->num_used; }
  /// Oldest chunk that this end has not released; null until it has arrived.
  __device__ const std::byte* front() {
    if (!is_ready()) see(look());
    return next();
  }
  /// Variant of front() that loads no word over PCIe.
  __device__ const std::byte* next() const { return is_ready() ? chunks_ + slot() * chunk_bytes_ : nullptr; }
  __device__ bool is_ready() const { return arrived_ > chunk_idx_; }
  /// Whether the front chunk is the first one that has not arrived.
  __device__ bool is_first_missing() const { return arrived_ == chunk_idx_; }
  /// Number of chunks that have arrived; loads the proxy's word over PCIe.
  __device__ std::uint64_t look() const { return load_acquire_system(&words_->arrived); }
  __device__ void see(std::uint64_t arrived) { arrived_ = arrived; }
  /// Releases the front chunk.
  __device__ void release() {
    fence_system();
    const std::uint64_t at = slot();
    store_relaxed_system(&words_->used[at], ++chunk_idx_);
  }
  /// Number of the front chunk.
  __device__ std::uint64_t chunk_idx() const { return chunk_idx_; }
  __device__ void seek(std::uint64_t chunk_idx) { chunk_idx_ = chunk_idx; }
  /// Number of chunks that have arrived, as this end saw last.
  __device__ std::uint64_t seen() const { return arrived_; }

 private:
  __device__ std::uint64_t slot() const { return chunk_idx_ % num_chunks_; }

  net::RingWords* words_;
  const std::byte* chunks_;
  std::uint64_t num_chunks_;
  std::uint64_t chunk_bytes_;
  std::uint64_t chunk_idx_ = 0;
  std::uint64_t arrived_ = 0;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_RING_CUH
