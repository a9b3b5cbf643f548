#ifndef FERRY_CUDA_COPY_BULK_COPY_CUH
#define FERRY_CUDA_COPY_BULK_COPY_CUH

/// Replaces src/cuda/copy/bulk_copy.cuh where kernels are emulated. At random, a load copies when it is started or when
/// a thread waits for it, so a kernel that uses memory too early, or reuses it too early, finds wrong bytes. A store
/// likewise reads and writes when it is started, or when its thread waits for it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

inline constexpr int kLandingBytes = 128;

using SharedAddress = std::uintptr_t;
inline SharedAddress shared_address(const void* pointer) { return reinterpret_cast<SharedAddress>(pointer); }

struct EmulatedBarrier {
  std::int32_t bytes_left;
  std::uint8_t expected;  ///< arrivals
  std::uint8_t arrived;
  std::uint16_t phase;

  static EmulatedBarrier& of(std::uint64_t* word) { return *reinterpret_cast<EmulatedBarrier*>(word); }
  void complete() {
    if (arrived != expected || bytes_left != 0) return;
    arrived = 0;
    phase ^= 1U;
  }
};
static_assert(sizeof(EmulatedBarrier) == sizeof(std::uint64_t));

struct EmulatedLoad {
  void* to;
  const void* from;
  std::uint32_t bytes;
};
/// Loads that have not been made, by barrier.
inline std::map<std::uint64_t*, std::vector<EmulatedLoad>> late_loads;
inline std::uint32_t load_lots = 1;

inline void make_load(const EmulatedLoad& load, std::uint64_t* barrier) {
  std::memcpy(load.to, load.from, load.bytes);
  EmulatedBarrier& word = EmulatedBarrier::of(barrier);
  word.bytes_left -= static_cast<std::int32_t>(load.bytes);
  word.complete();
}

inline void init_barrier(std::uint64_t* barrier, int num_arrivals = 1) {
  EmulatedBarrier::of(barrier) = {0, static_cast<std::uint8_t>(num_arrivals), 0, 0};
}
inline void publish_barriers() {}

inline void expect_loads(std::uint64_t* barrier, std::uint32_t bytes) {
  EmulatedBarrier& word = EmulatedBarrier::of(barrier);
  word.bytes_left += static_cast<std::int32_t>(bytes);
  ++word.arrived;
  word.complete();
}

inline void start_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
  load_lots = load_lots * 1664525U + 1013904223U;
  const EmulatedLoad load{shared, global, bytes};
  if (load_lots >> 31 != 0) {
    make_load(load, barrier);
  } else {
    late_loads[barrier].push_back(load);
  }
}

inline void wait_barrier(std::uint64_t* barrier, std::uint32_t parity) {
  while ((EmulatedBarrier::of(barrier).phase & 1U) == parity) {
    const auto late = late_loads.extract(barrier);
    if (!late.empty()) {
      for (const EmulatedLoad& load : late.mapped()) make_load(load, barrier);
    }
    emulator::poll();
  }
}

inline uint4 load_landed(SharedAddress address) { return *reinterpret_cast<const uint4*>(address); }
inline uint2 load_landed_pair(SharedAddress address) { return *reinterpret_cast<const uint2*>(address); }
inline float load_landed_float(SharedAddress address) { return *reinterpret_cast<const float*>(address); }

struct EmulatedStore {
  void* to;
  const void* from;
  std::uint32_t bytes;
  std::vector<std::byte> read;

  void make_read() {
    const auto* begin = static_cast<const std::byte*>(from);
    if (read.empty()) read.assign(begin, begin + bytes);
  }
};
using EmulatedStoreGroup = std::vector<EmulatedStore>;
/// Closed store groups of each thread in order, and the open one.
struct EmulatedStores {
  std::deque<EmulatedStoreGroup> closed;
  EmulatedStoreGroup open;
};
inline std::map<const void*, EmulatedStores> late_stores;

inline void start_store(void* global, const void* shared, std::uint32_t bytes) {
  load_lots = load_lots * 1664525U + 1013904223U;
  if (load_lots >> 31 != 0) {
    std::memcpy(global, shared, bytes);
  } else {
    late_stores[&emulator::place()].open.push_back({global, shared, bytes, {}});
  }
}
inline void close_store_group() {
  EmulatedStores& stores = late_stores[&emulator::place()];
  stores.closed.push_back(std::exchange(stores.open, {}));
}
template <int kOpen>
void wait_store_reads() {
  std::deque<EmulatedStoreGroup>& closed = late_stores[&emulator::place()].closed;
  for (std::size_t i = 0; i + kOpen < closed.size(); ++i) {
    for (EmulatedStore& store : closed[i]) store.make_read();
  }
}
template <int kOpen>
void wait_store_groups() {
  wait_store_reads<kOpen>();
  std::deque<EmulatedStoreGroup>& closed = late_stores[&emulator::place()].closed;
  for (; closed.size() > kOpen; closed.pop_front()) {
    for (const EmulatedStore& store : closed.front()) std::memcpy(store.to, store.read.data(), store.bytes);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_COPY_BULK_COPY_CUH
