#ifndef FERRY_TESTS_ONE_SIDED_LONE_SOURCE_HPP
#define FERRY_TESTS_ONE_SIDED_LONE_SOURCE_HPP

/// A ring of requests and its source, without a network.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "one_sided/ring_source.hpp"
#include "support/host_ring.hpp"

namespace ferry::test {

inline bool any_peer(int /*peer*/) { return true; }

/// Rank 0 is on this node, all others are not.
struct LoneSource {
  struct Options {
    std::uint64_t num_slots = 4;
    int num_ranks = 2;
    std::size_t max_held_bytes = one_sided::kMaxHeldBytes;
  };
  static constexpr std::uint64_t kSlotBytes = 64;
  static constexpr std::size_t kHeapBytes = std::size_t{64} << 10;
  static constexpr std::int64_t kTimeoutNs = 60'000'000'000;

  explicit LoneSource(const Options& options) : ring(options.num_slots, kSlotBytes, kHeapBytes) {
    one_sided::RingSource::Options made;
    made.ring = ring.memory();
    made.limits = {.num_peers = options.num_ranks,
                   .local_bytes = kHeapBytes + ring.staging_bytes(),
                   .remote_bytes = kHeapBytes,
                   .timeout_ns = kTimeoutNs};
    made.heap = heap.data();
    made.staging = ring.staging();
    made.peer_heaps.resize(static_cast<std::size_t>(options.num_ranks));
    made.peer_heaps[0] = heap.data();
    made.num_parts = &one_sided::Driver::num_parts;
    made.max_held_bytes = options.max_held_bytes;
    source = std::make_unique<one_sided::RingSource>(std::move(made));
  }

  std::vector<std::byte> heap = std::vector<std::byte>(kHeapBytes);
  HostRing ring;
  std::unique_ptr<one_sided::RingSource> source;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_ONE_SIDED_LONE_SOURCE_HPP
