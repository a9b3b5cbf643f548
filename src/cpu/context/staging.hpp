#ifndef FERRY_CPU_CONTEXT_STAGING_HPP
#define FERRY_CPU_CONTEXT_STAGING_HPP

/// Memory of the arena that the backend itself uses: kept from call to call, grown when a call needs more.
///
/// Route tables alternate between two blocks by route, because a peer may still read the tables of a route that this
/// rank has finished; it cannot be two routes behind. For the same reason nothing is freed when a rank leaves: the
/// memory is freed with the arena's last mapping, and peers keep theirs. Records, rows and quantised rows have a block
/// each: every dispatch and combine ends with all ranks done.

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
  /// Memory for the forward tables of the route that took route_tables() last; they alternate with those.
  Result<std::byte*> forward_tables(std::size_t bytes);
  /// Memory for the token records or returned weights of one call.
  Result<std::byte*> records(std::size_t bytes);
  /// Memory for the payload rows of one call.
  Result<std::byte*> rows(std::size_t bytes);
  /// Memory for the rows that one dispatch quantises, and their scales.
  Result<std::byte*> quantized(std::size_t bytes);
  /// Make sure that rows(bytes) will find room if nothing is allocated in between. (The machine may still be out of
  /// memory.)
  Status check_room_for_rows(std::size_t bytes);
  /// All ranks have finished the latest route: a later call of theirs has begun.
  void route_is_over() { tables_are_read_ = false; }
  /// Frees what no peer can still use. Between calls: then only the latest route's tables can be read, until
  /// route_is_over().
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
  bool tables_are_read_ = false;  // perhaps those of the latest route, by peers that have not finished it
  Block records_;
  Block rows_;
  Block quantized_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CONTEXT_STAGING_HPP
