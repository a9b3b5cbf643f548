#ifndef FERRY_TESTS_UCX_CARD_MEMORY_HPP
#define FERRY_TESTS_UCX_CARD_MEMORY_HPP

/// Registered memory of this process as cards reach it. No mutex is needed.

#include <cstddef>
#include <cstdint>

#include "ucx_card/objects.hpp"

namespace ferry::ucx_card {

/// A piece of a put or get.
struct Range {
  std::uint64_t remote = 0;  ///< address of the whole put or get
  std::size_t num_bytes = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  std::byte* address() const { return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(remote)) + begin; }
};

/// Copies as cards do: each aligned word of four, eight or sixteen bytes in one piece, seen by threads that read it
/// meanwhile.
void copy_words(std::byte* to, const std::byte* from, std::size_t num_bytes);

/// Begins to use the memory through a worker's port. Other than UCS_OK: there is none with such bounds, and a card
/// refuses the whole put or get. Both may be null.
ucs_status_t begin_use(const Port* port, ucp_mem* region, const Range& range);
/// As begin_use(), to copy the piece.
ucs_status_t read_memory(const Port* port, ucp_mem* region, const Range& range, std::byte* into);
ucs_status_t write_memory(const Port* port, ucp_mem* region, const Range& range, const std::byte* source);

}  // namespace ferry::ucx_card

#endif  // FERRY_TESTS_UCX_CARD_MEMORY_HPP
