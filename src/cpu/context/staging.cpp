#include "cpu/context/staging.hpp"

#include <fmt/format.h>

namespace ferry::cpu {

Result<std::byte*> Staging::ensure(Block& block, std::size_t bytes) {
  if (block.size_bytes >= bytes) return block.data;
  // Free the old block first: no peer reads it any more, and there may not be room for both.
  free(block);
  Result<std::byte*> grown = arena_->take(bytes);
  if (grown.ok()) block = Block{*grown, bytes};
  return grown;
}

void Staging::free(Block& block) {
  arena_->give(block.data, block.size_bytes);
  block = Block();
}

void Staging::trim() {
  free(records_);
  free(rows_);
  free(quantized_);
  free(checksums_);
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const bool latest = i != next_tables_;
    if (latest && tables_are_read_) continue;
    free(tables_[i]);
    free(forward_tables_[i]);
  }
}

Result<std::byte*> Staging::route_tables(std::size_t bytes) {
  Result<std::byte*> tables = ensure(tables_[next_tables_], bytes);
  if (tables.ok()) {
    next_tables_ = 1 - next_tables_;
    tables_are_read_ = true;
  }
  return tables;
}

Result<std::byte*> Staging::forward_tables(std::size_t bytes) {
  return ensure(forward_tables_[1 - next_tables_], bytes);
}

Result<std::byte*> Staging::records(std::size_t bytes) { return ensure(records_, bytes); }

Result<std::byte*> Staging::rows(std::size_t bytes) { return ensure(rows_, bytes); }

Result<std::byte*> Staging::quantized(std::size_t bytes) { return ensure(quantized_, bytes); }

Result<std::byte*> Staging::checksums(std::size_t bytes) { return ensure(checksums_, bytes); }

Status Staging::check_room_for_rows(std::size_t bytes) {
  if (bytes <= rows_.size_bytes || bytes <= arena_->largest_free_bytes()) return {};
  // Between calls no peer reads the block, and freeing it may make a range large enough.
  free(rows_);
  const std::size_t free_bytes = arena_->largest_free_bytes();
  if (bytes <= free_bytes) return {};
  return Status(
      ErrorCode::kCapacity,
      fmt::format("rows that peers cannot reach need {} bytes of staging, but the arena's largest free range is {}; "
                  "put them in memory from Group::allocate, or raise GroupOptions::arena_bytes",
                  bytes, free_bytes));
}

std::size_t Staging::held_bytes() const {
  std::size_t bytes = 0;
  for (const Block& block :
       {tables_[0], tables_[1], forward_tables_[0], forward_tables_[1], records_, rows_, quantized_, checksums_})
    bytes += round_up_to_page(block.size_bytes);
  return bytes;
}

}  // namespace ferry::cpu
