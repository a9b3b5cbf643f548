#ifndef FERRY_CUDA_SYNC_RING_CUH
#define FERRY_CUDA_SYNC_RING_CUH

/// The ends of a ring between nodes as a kernel uses them: the device's counterpart of rail::Ring, on the same words
/// (net/ring_words.hpp), which must be in pinned host memory. Nothing here waits. One thread of a block calls; the
/// block's other threads are ordered with it by a barrier.

#include <cstddef>
#include <cstdint>

#include "cuda/sync/memory_order.cuh"
#include "net/ring_words.hpp"

namespace ferry::cuda::device {

/// The sender's end.
class SendRing {
 public:
  __device__ SendRing(net::RingWords* words, std::byte* chunks, std::uint64_t num_chunks, std::uint64_t chunk_bytes)
      : words_(words),
        chunks_(chunks),
        num_chunks_(num_chunks),
        chunk_bytes_(chunk_bytes),
        num_filled_(words->filled) {}

  /// Where the next chunk goes; null while the peer has to use one first.
  __device__ std::byte* reserve() const {
    const std::uint64_t credits = load_acquire_system(&words_->credits);
    if (static_cast<std::int64_t>(credits + num_chunks_ - num_filled_) <= 0) return nullptr;
    return chunks_ + num_filled_ % num_chunks_ * chunk_bytes_;
  }
  /// Sends the reserved chunk, `num_bytes` of it.
  __device__ void commit(std::uint32_t num_bytes) {
    words_->chunk_bytes[num_filled_ % num_chunks_] = num_bytes;
    ++num_filled_;
    fence_system();
    store_release_system(&words_->filled, num_filled_);
  }
  /// Number of the next chunk.
  __device__ std::uint64_t chunk_idx() const { return num_filled_; }

 private:
  net::RingWords* words_;
  std::byte* chunks_;
  std::uint64_t num_chunks_;
  std::uint64_t chunk_bytes_;
  std::uint64_t num_filled_;
};

/// The receiver's end.
class ReceiveRing {
 public:
  __device__ ReceiveRing(net::RingWords* words, const std::byte* chunks, std::uint64_t num_chunks,
                         std::uint64_t chunk_bytes)
      : words_(words), chunks_(chunks), num_chunks_(num_chunks), chunk_bytes_(chunk_bytes), num_used_(words->used) {}

  /// The oldest chunk that is not released yet; null while none has arrived.
  __device__ const std::byte* front() const {
    if (load_acquire_system(&words_->arrived) <= num_used_) return nullptr;
    return chunks_ + num_used_ % num_chunks_ * chunk_bytes_;
  }
  /// The front chunk is used.
  __device__ void release() {
    ++num_used_;
    fence_system();
    store_release_system(&words_->used, num_used_);
  }
  /// Number of the front chunk.
  __device__ std::uint64_t chunk_idx() const { return num_used_; }

 private:
  net::RingWords* words_;
  const std::byte* chunks_;
  std::uint64_t num_chunks_;
  std::uint64_t chunk_bytes_;
  std::uint64_t num_used_;
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_RING_CUH
