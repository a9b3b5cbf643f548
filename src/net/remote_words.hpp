#ifndef FERRY_NET_REMOTE_WORDS_HPP
#define FERRY_NET_REMOTE_WORDS_HPP

/// Access to memory that other ranks read and write at the same time.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace ferry::net {

/// Atomic step on an aligned word of a peer's memory, atomic for all ranks that use atomics of that size on that word.
struct AtomicOp {
  enum class Kind : std::uint32_t {
    kSet = 0,          ///< word = operand
    kAdd = 1,          ///< word += operand
    kCompareSwap = 2,  ///< if word == compare: word = operand
    kAnd = 3,          ///< word &= operand
    kOr = 4,           ///< word |= operand
    kXor = 5,          ///< word ^= operand
  };
  Kind kind = Kind::kSet;
  std::size_t word_bytes = sizeof(std::uint64_t);  ///< 4 or 8; operand and compare fit into the word
  std::size_t offset = 0;
  std::uint64_t operand = 0;
  std::uint64_t compare = 0;
};

/// True if the operation can be applied to the memory: a known kind, and an aligned word inside it.
inline bool is_sound(const AtomicOp& op, std::span<const std::byte> memory) {
  const bool is_narrow = op.word_bytes == sizeof(std::uint32_t);
  if (!is_narrow && op.word_bytes != sizeof(std::uint64_t)) return false;
  if (is_narrow && (op.operand > UINT32_MAX || op.compare > UINT32_MAX)) return false;
  return op.kind <= AtomicOp::Kind::kXor && op.offset % op.word_bytes == 0 && memory.size() >= op.word_bytes &&
         op.offset <= memory.size() - op.word_bytes;
}

/// Sequentially consistent. Returns the previous value of the word.
template <typename Word>
std::uint64_t apply_atomic_to(Word* address, const AtomicOp& op) {
  constexpr std::memory_order kOrder = std::memory_order_seq_cst;
  const std::atomic_ref<Word> word(*address);
  const auto operand = static_cast<Word>(op.operand);
  switch (op.kind) {
    case AtomicOp::Kind::kSet:
      return word.exchange(operand, kOrder);
    case AtomicOp::Kind::kAdd:
      return word.fetch_add(operand, kOrder);
    case AtomicOp::Kind::kAnd:
      return word.fetch_and(operand, kOrder);
    case AtomicOp::Kind::kOr:
      return word.fetch_or(operand, kOrder);
    case AtomicOp::Kind::kXor:
      return word.fetch_xor(operand, kOrder);
    case AtomicOp::Kind::kCompareSwap:
      break;
  }
  auto before = static_cast<Word>(op.compare);
  word.compare_exchange_strong(before, operand, kOrder);
  return before;
}

/// apply_atomic_to the word of a sound operation. `memory` is aligned to 8 bytes.
inline std::uint64_t apply_atomic(std::byte* memory, const AtomicOp& op) {
  std::byte* const word = memory + op.offset;
  return op.word_bytes == sizeof(std::uint32_t) ? apply_atomic_to(reinterpret_cast<std::uint32_t*>(word), op)
                                                : apply_atomic_to(reinterpret_cast<std::uint64_t*>(word), op);
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
