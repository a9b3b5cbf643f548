#ifndef FERRY_NET_ATOMIC_OP_HPP
#define FERRY_NET_ATOMIC_OP_HPP

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::net {

/// One step on a word of 8 bytes at an aligned offset of a peer's memory, as all see it that use atomics on that word.
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

/// Whether this can be done to the memory: a known kind, an aligned word inside it.
inline bool is_sound(const AtomicOp& op, std::span<const std::byte> memory) {
  return op.kind <= AtomicOp::Kind::kCompareSwap && op.offset % sizeof(std::uint64_t) == 0 &&
         memory.size() >= sizeof(std::uint64_t) && op.offset <= memory.size() - sizeof(std::uint64_t);
}

/// Sequentially consistent. Returns what the word was before.
inline std::uint64_t apply_atomic(std::uint64_t* word, const AtomicOp& op) {
  const std::atomic_ref<std::uint64_t> shared(*word);
  if (op.kind == AtomicOp::Kind::kSet) return shared.exchange(op.operand, std::memory_order_seq_cst);
  if (op.kind == AtomicOp::Kind::kAdd) return shared.fetch_add(op.operand, std::memory_order_seq_cst);
  std::uint64_t before = op.compare;
  shared.compare_exchange_strong(before, op.operand, std::memory_order_seq_cst);
  return before;
}

}  // namespace ferry::net

#endif  // FERRY_NET_ATOMIC_OP_HPP
