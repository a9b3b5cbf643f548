#ifndef FERRY_ONE_SIDED_WORDS_HPP
#define FERRY_ONE_SIDED_WORDS_HPP

/// Processor access to words of shared memory: atomic for all ranks that map them, and sequentially consistent, which
/// rings (fabric.hpp) and signals after puts rely on.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "net/engine.hpp"

namespace ferry::one_sided {

inline std::uint64_t load(const std::uint64_t* word) {
  // atomic_ref requires a mutable object (C++20); a load does not change it.
  return std::atomic_ref(*const_cast<std::uint64_t*>(word)).load(std::memory_order_seq_cst);
}

using net::load_bytes;
using net::store_bytes;

}  // namespace ferry::one_sided

#endif  // FERRY_ONE_SIDED_WORDS_HPP
