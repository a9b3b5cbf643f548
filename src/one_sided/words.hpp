#ifndef FERRY_ONE_SIDED_WORDS_HPP
#define FERRY_ONE_SIDED_WORDS_HPP

/// Words of shared memory as processors change them: in one step for all ranks that map them, and sequentially
/// consistent, which rings (fabric.hpp) and signals after puts rely on.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "net/engine.hpp"

namespace ferry::one_sided {

inline std::uint64_t load(const std::uint64_t* word) {
  // atomic_ref wants a mutable object (C++20); a load changes none.
  return std::atomic_ref(*const_cast<std::uint64_t*>(word)).load(std::memory_order_seq_cst);
}

/// Applies `op` to the word at its offset from `base`. Returns what the word was before.
inline std::uint64_t apply_at(std::byte* base, const net::AtomicOp& op) {
  return net::apply_atomic(reinterpret_cast<std::uint64_t*>(base + op.offset), op);
}

/// Copies so that 4 or 8 aligned bytes are stored in one piece, and after everything that this thread stored before.
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

/// Copies so that 4 or 8 aligned bytes are loaded in one piece, and before everything that this thread loads after.
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

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_WORDS_HPP
