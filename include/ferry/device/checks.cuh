#ifndef FERRY_DEVICE_CHECKS_CUH
#define FERRY_DEVICE_CHECKS_CUH

/// Checks at the start of a call in a kernel: whether the rank and the address are valid, and where the memory is; and
/// the record of a failure.

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

/// A heap is a whole number of words. `Word`: of 4 or 8 bytes, here and in all calls.
template <typename Word>
__device__ inline bool is_word(const World& world, const Word* word) {
  const std::uint64_t offset = offset_of(world, word);
  return (offset < world.heap_bytes) & (offset % sizeof(*word) == 0);
}

/// Whether the rank is one of the first `num_near` of this node.
__device__ inline bool is_near_rank(const World& world, int rank, int num_near) {
  return static_cast<unsigned>(rank) - static_cast<unsigned>(world.first_in_node) < static_cast<unsigned>(num_near);
}

/// Whether this GPU itself can access `num_bytes` at symmetric address `data` of the rank, through near_address. One
/// condition without branches that depends only on the arguments and the World, so that the compiler computes it once
/// for a warp or before a loop, not in every thread.
__device__ inline bool is_near(const World& world, int rank, const void* data, std::uint64_t num_bytes) {
  const std::uint64_t offset = offset_of(world, data);
  return is_near_rank(world, rank, world.num_near) & (offset <= world.heap_bytes) &
         (num_bytes <= world.heap_bytes - offset);
}

/// Whether a value at symmetric address `data` can be loaded and stored in one piece.
template <typename T>
__device__ inline bool is_aligned(const World& world, const T* data) {
  return offset_of(world, data) % sizeof(T) == 0;
}

/// is_near for a word. `num_near`: number of near ranks whose words this GPU may access so.
template <typename Word>
__device__ inline bool is_near_word(const World& world, int rank, const Word* word, int num_near) {
  const bool is_of_near_rank = is_near_rank(world, rank, num_near);
  const bool is_of_heap = is_word(world, word);
  return is_of_near_rank & is_of_heap;
}

/// `data` of this rank in the memory of a near rank. For other ranks the result is an arbitrary address, so that it can
/// be computed before the ranks are told apart. The pointer is moved, not made from a number: the compiler would have
/// to assume that a store through the latter changes the kernel's parameters, and would load them again.
template <typename T>
__device__ inline T* near_address(const World& world, int rank, T* data) {
  static_assert((kNumNearRanks & (kNumNearRanks - 1)) == 0, "or ranks of a node share a place");
  const std::int64_t shift = world.near_shifts[static_cast<unsigned>(rank) % kNumNearRanks];
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data) + shift);
}

/// `data` of this rank in the memory of any rank of this node.
__device__ inline std::byte* at_peer(const World& world, int rank, const void* data) {
  return world.peer_heaps[rank - world.first_in_node] + offset_of(world, data);
}

/// at_peer, quicker where the rank is near.
template <typename T>
__device__ inline T* peer_address(const World& world, int rank, T* data) {
  if (is_near_rank(world, rank, world.num_near)) return near_address(world, rank, data);
  return reinterpret_cast<T*>(at_peer(world, rank, data));
}

/// Subject of a call. The error record is built from it only after an error: a record would be in local memory, whose
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

/// Not inlined, which keeps the usual path short.
__device__ __noinline__ inline void record(const World& world, Code code, About about) {
  fail(world, code, failure(world, about));
}

/// One thread records the error, and all members return the same code.
template <Scope kScope>
__device__ inline Code finish(const World& world, Code code, About about) {
  if (code != Code::kOk && is_leader<kScope>()) record(*world.stored, code, about);
  return code;
}

}  // namespace ferry::device::detail

#endif  // FERRY_DEVICE_CHECKS_CUH
