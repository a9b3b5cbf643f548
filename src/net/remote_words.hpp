#ifndef FERRY_NET_REMOTE_WORDS_HPP
#define FERRY_NET_REMOTE_WORDS_HPP

/// Access to memory that other ranks read and write at the same time.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace ferry::net {

/// Atomic step on an aligned word of 8 bytes of a peer's memory, atomic for all ranks that use atomics on that word.
struct AtomicOp {
  enum class Kind : std::uint32_t {
    kSet = 0,          ///< word = operand
    kAdd = 1,          ///< word += operand
    kCompareSwap = 2,  ///< if word == compare: word = operand
  };
  Kind kind = Kind::kSet;
  std::size_t offset = 0;
  std::uint64_t operand = 0;
  std::uint64_t compare = 0;
};

/// True if the operation can be applied to the memory: a known kind, and an aligned word inside it.
inline bool is_sound(const AtomicOp& op, std::span<const std::byte> memory) {
  return op.kind <= AtomicOp::Kind::kCompareSwap && op.offset % sizeof(std::uint64_t) == 0 &&
         memory.size() >= sizeof(std::uint64_t) && op.offset <= memory.size() - sizeof(std::uint64_t);
}

/// Sequentially consistent. `memory` is aligned to 8 bytes. Returns the previous value of the word.
inline std::uint64_t apply_atomic(std::byte* memory, const AtomicOp& op) {
  const std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(memory + op.offset));
  if (op.kind == AtomicOp::Kind::kSet) return word.exchange(op.operand, std::memory_order_seq_cst);
  if (op.kind == AtomicOp::Kind::kAdd) return word.fetch_add(op.operand, std::memory_order_seq_cst);
  std::uint64_t before = op.compare;
  word.compare_exchange_strong(before, op.operand, std::memory_order_seq_cst);
  return before;
}

/// Copies bytes. Stores 4 or 8 aligned bytes in one piece, after all earlier stores of this thread (release).
inline void store_bytes(std::byte* dest, const std::byte* source, std::size_t num_bytes) {
  const auto is_aligned = [&](std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(dest) % alignment == 0;
  };
  if (num_bytes == sizeof(std::uint64_t) && is_aligned(sizeof(std::uint64_t))) {
    std::uint64_t value = 0;
    std::memcpy(&value, source, sizeof(value));
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(dest)).store(value, std::memory_order_release);
  } else if (num_bytes == sizeof(std::uint32_t) && is_aligned(sizeof(std::uint32_t))) {
    std::uint32_t value = 0;
    std::memcpy(&value, source, sizeof(value));
    std::atomic_ref(*reinterpret_cast<std::uint32_t*>(dest)).store(value, std::memory_order_release);
  } else if (num_bytes > 0) {
    std::memcpy(dest, source, num_bytes);
  }
}

/// Copies bytes. Loads 4 or 8 aligned bytes in one piece, before all later loads of this thread (acquire).
inline void load_bytes(std::byte* dest, const std::byte* source, std::size_t num_bytes) {
  const auto is_aligned = [&](std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(source) % alignment == 0;
  };
  if (num_bytes == sizeof(std::uint64_t) && is_aligned(sizeof(std::uint64_t))) {
    const std::uint64_t value = std::atomic_ref(*reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(source)))
                                    .load(std::memory_order_acquire);
    std::memcpy(dest, &value, sizeof(value));
  } else if (num_bytes == sizeof(std::uint32_t) && is_aligned(sizeof(std::uint32_t))) {
    const std::uint32_t value = std::atomic_ref(*reinterpret_cast<std::uint32_t*>(const_cast<std::byte*>(source)))
                                    .load(std::memory_order_acquire);
    std::memcpy(dest, &value, sizeof(value));
  } else if (num_bytes > 0) {
    std::memcpy(dest, source, num_bytes);
  }
}

}  // namespace ferry::net

#endif  // FERRY_NET_REMOTE_WORDS_HPP
