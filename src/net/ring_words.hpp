#ifndef FERRY_NET_RING_WORDS_HPP
#define FERRY_NET_RING_WORDS_HPP

/// Words through which the ends of a ring and the proxy between them share their progress. A ring carries chunks from
/// one rank to a peer; both ends have memory for the same number of chunks, and chunk i is stored at index i modulo
/// that number. Words count chunks since creation and only grow, so no word is ever reset. A producer or consumer may
/// be a thread, a kernel or several blocks of one, which fill and use chunks in any order; the proxy, which does not
/// distinguish them, sends chunks in order.
///
///   sender's end
///   word         writer    reader    order              publishes
///   filled[i]    producer  proxy     release / acquire  the chunk at index i: filled_word()
///   num_filled   producer  producer  relaxed            nothing; chunks before the next exchange
///   sent         proxy     any       relaxed            nothing; for diagnosis
///   credits      proxy     producer  release / acquire  nothing; chunks that the peer has used: chunks below
///                                                       credits + number of chunks may be filled
///   receiver's end
///   arrived      proxy     consumer  release / acquire  the chunks below it
///   closed       proxy     any       release / acquire  nothing; 1: the peer sends no more chunks than `arrived`
///   used[i]      consumer  proxy     release / acquire  the end of all reads of the chunk at index i: its number + 1
///   num_used     consumer  consumer  relaxed            nothing; chunks before the next exchange
///
/// A thread that fills or uses chunks wakes the proxy afterwards (Proxy::post_ring); it stores `filled` and `used` with
/// seq_cst, so that either it sees the proxy asleep and wakes it, or the proxy sees the new value and does not sleep. A
/// kernel cannot wake the proxy: while kernels use a ring, the proxy must poll (Proxy::keep_polling). The words are in
/// pinned memory; a kernel stores them behind fence.sys, and num_filled and num_used when its exchange ends.

#include <cstddef>
#include <cstdint>

#include "ferry/device/host_device.hpp"

namespace ferry::net {

/// Maximum number of chunks: 50 GB/s with 20 µs of latency keep 1 MB in flight, which is 16 chunks of 64 KiB.
inline constexpr std::size_t kMaxRingChunks = 64;

/// Two cache lines, so that words of different writers do not share a pair: neighbouring lines are fetched in pairs
/// (Intel optimisation manual, spatial prefetcher).
inline constexpr std::size_t kRingWordAlignment = 128;

/// Words of the ring to a peer and of the ring from it. Initially zero.
struct RingWords {
  // Written by the producer.
  alignas(kRingWordAlignment) std::uint64_t filled[kMaxRingChunks];
  std::uint64_t num_filled;

  // Written by the consumer.
  alignas(kRingWordAlignment) std::uint64_t used[kMaxRingChunks];
  std::uint64_t num_used;

  // Written by the proxy.
  alignas(kRingWordAlignment) std::uint64_t sent;
  std::uint64_t credits;
  std::uint64_t arrived;
  std::uint64_t closed;
};

/// Word of a filled chunk: one more than the lower half of its number, and the bytes to send, including its header.
FERRY_HOST_DEVICE constexpr std::uint64_t filled_word(std::uint64_t chunk_idx, std::uint32_t num_bytes) {
  return (chunk_idx + 1) << 32 | num_bytes;
}
constexpr bool is_filled(std::uint64_t word, std::uint64_t chunk_idx) {
  return word >> 32 == ((chunk_idx + 1) & 0xFFFFFFFF);
}
constexpr std::size_t bytes_of_filled(std::uint64_t word) { return static_cast<std::uint32_t>(word); }

/// A ring and its counterpart in the other direction, as the proxy serves them. Offsets refer to the engine's memory:
/// this end's, or the peer's for `remote_offset`.
struct RingPort {
  RingWords* words = nullptr;
  std::size_t num_chunks = 0;     ///< at most kMaxRingChunks
  std::size_t chunk_stride = 0;   ///< bytes from one chunk to the next
  std::size_t send_offset = 0;    ///< this end's chunks for the peer
  std::size_t remote_offset = 0;  ///< chunks in the peer's memory
  int chunk_channel = 0;          ///< carries the number of sent chunks to the peer's `arrived`
  int credit_channel = 0;         ///< carries the number of used chunks to the peer's `credits`
};

}  // namespace ferry::net

#endif  // FERRY_NET_RING_WORDS_HPP
