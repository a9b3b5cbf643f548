#ifndef FERRY_CPU_CONTEXT_STAGING_HPP
#define FERRY_CPU_CONTEXT_STAGING_HPP

/// Arena memory that the backend itself uses: kept from call to call, grown when a call needs more.
///
/// Route tables alternate between two blocks by route, because a peer may still read the tables of a route that this
/// rank has finished; it cannot be two routes behind. For the same reason nothing is freed when a rank leaves: the
/// memory is freed with the arena's last mapping, and peers keep theirs. Records, rows, quantised rows and
/// checksums have a block each, because every dispatch and combine ends only when all ranks are done.

#include <array>
#include <cstddef>
#include <memory>

#include "node/arena.hpp"

namespace ferry::cpu {

using node::Arena;
using node::round_up_to_page;

class Staging {
 public:
  explicit Staging(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  /// Memory for the next route's tables.
  Result<std::byte*> route_tables(std::size_t bytes);
  /// Memory for the forward tables of the route that took route_tables() last; they alternate too.
  Result<std::byte*> forward_tables(std::size_t bytes);
  /// Memory for the token records or returned weights of one call.
  Result<std::byte*> records(std::size_t bytes);
  /// Memory for the payload rows of one call.
  Result<std::byte*> rows(std::size_t bytes);
  /// Memory for the checksums of the rows that a combine returns (GroupOptions::verify).
  Result<std::byte*> checksums(std::size_t bytes);
  /// Memory for the rows that a dispatch quantises, and their scales.
  Result<std::byte*> quantized(std::size_t bytes);
  /// Ensures that rows(bytes) will find room if nothing is allocated in between. (The machine may still run out of
  /// memory.)
  Status check_room_for_rows(std::size_t bytes);
  /// Call when all ranks have finished the latest route: they have begun a later call.
  void route_is_over() { tables_are_read_ = false; }
  /// Frees memory that no peer can still use. Call between calls: then peers can read only the latest route's tables,
  /// and only until route_is_over().
  void trim();
  /// Arena memory held now.
  std::size_t held_bytes() const;

 private:
  struct Block {
    std::byte* data = nullptr;
    std::size_t size_bytes = 0;
  };
  Result<std::byte*> ensure(Block& block, std::size_t bytes);
  void free(Block& block);

  std::shared_ptr<Arena> arena_;
  std::array<Block, 2> tables_;
  std::array<Block, 2> forward_tables_;
  std::size_t next_tables_ = 0;
  bool tables_are_read_ = false;  // peers that have not finished the latest route may read its tables
  Block records_;
  Block rows_;
  Block quantized_;
  Block checksums_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_STAGING_HPP
