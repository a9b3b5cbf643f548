#ifndef FERRY_DEVICE_CHECKS_CUH
#define FERRY_DEVICE_CHECKS_CUH

/// What a call in a kernel looks at before it does anything: whether the rank and the address are good, whose the
/// memory is and where, and what is recorded where they are not.

#include <cstddef>
#include <cstdint>

#include "ferry/device/scope.cuh"
#include "ferry/device/wait.cuh"
#include "ferry/device/world.hpp"

namespace ferry::device::detail {

__device__ inline bool is_rank(const World& world, int rank) { return rank >= 0 && rank < world.num_ranks; }

__device__ inline bool in_node(const World& world, int rank) {
  return static_cast<unsigned>(rank) - static_cast<unsigned>(world.first_in_node) <
         static_cast<unsigned>(world.ranks_per_node);
}

__device__ inline std::uint64_t offset_of(const World& world, const void* data) {
  return static_cast<std::uint64_t>(static_cast<const std::byte*>(data) - world.heap);
}

__device__ inline bool is_symmetric(const World& world, const void* data, std::uint64_t num_bytes) {
  const std::uint64_t offset = offset_of(world, data);
  return offset <= world.heap_bytes && num_bytes <= world.heap_bytes - offset;
}

/// A heap is a whole number of words.
__device__ inline bool is_word(const World& world, const std::uint64_t* word) {
  const std::uint64_t offset = offset_of(world, word);
  return (offset < world.heap_bytes) & (offset % sizeof(*word) == 0);
}

/// Whether this GPU itself does what is asked for `num_bytes` at symmetric address `data` of the rank. One condition
/// without branches, and the only one that a call in a node takes: each thread of a block pays for every instruction.
__device__ inline bool is_near(const World& world, int rank, const void* data, std::uint64_t num_bytes) {
  const std::uint64_t offset = offset_of(world, data);
  return in_node(world, rank) & (offset <= world.heap_bytes) & (num_bytes <= world.heap_bytes - offset);
}

/// Whether a value at symmetric address `data` can be loaded and stored in one piece.
template <typename T>
__device__ inline bool is_aligned(const World& world, const T* data) {
  return offset_of(world, data) % sizeof(T) == 0;
}

/// is_near for a word.
__device__ inline bool is_near_word(const World& world, int rank, const std::uint64_t* word) {
  const bool is_of_node = in_node(world, rank);
  const bool is_of_heap = is_word(world, word);
  return is_of_node & is_of_heap;
}

/// The memory of a rank of this node.
__device__ inline std::byte* heap_of(const World& world, int rank) {
  const int idx = rank - world.first_in_node;
  return idx < kNumNearHeaps ? world.near_heaps[idx] : world.peer_heaps[idx];
}

/// `data` of this rank in the memory of one of this node.
__device__ inline std::byte* at_peer(const World& world, int rank, const void* data) {
  return heap_of(world, rank) + offset_of(world, data);
}

__device__ inline std::uint64_t* word_at(const World& world, int rank, const std::uint64_t* word) {
  return reinterpret_cast<std::uint64_t*>(at_peer(world, rank, word));
}

/// What a call is about. An error record is made of it only when there is an error: it would be in local memory, whose
/// stores the fence of a signal waits for.
struct About {
  Call call;
  int rank;
  const void* data;
  std::uint64_t num_bytes;
};

__device__ inline Failure failure(const World& world, const About& about) {
  Failure failure;
  failure.call = about.call;
  failure.rank = about.rank;
  failure.offset = offset_of(world, about.data);
  failure.num_bytes = about.num_bytes;
  failure.timeout_ns = world.timeout_ns;
  return failure;
}

/// Not inlined, so that what mostly happens is short and close together.
__device__ __noinline__ inline void record(const World& world, Code code, About about) {
  fail(world, code, failure(world, about));
}

/// One thread records what went wrong, and all members end alike.
template <Scope kScope>
__device__ inline Code finish(const World& world, Code code, About about) {
  if (code != Code::kOk && is_leader<kScope>()) record(world, code, about);
  return code;
}

}  // namespace ferry::device::detail

#endif  // FERRY_DEVICE_CHECKS_CUH
