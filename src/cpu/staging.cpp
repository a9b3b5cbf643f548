#include "cpu/staging.hpp"

#include <fmt/format.h>

namespace ferry::cpu {

Result<std::byte*> Staging::ensure(Buffer& block, std::size_t bytes) {
  if (block.size_bytes() < bytes) {
    block = Buffer();  // before the new one is taken: nobody reads it between calls
    Result<Buffer> grown = arena_->allocate(bytes);
    if (!grown.ok()) return grown.status();
    block = std::move(*grown);
  }
  return static_cast<std::byte*>(block.data());
}

Result<std::byte*> Staging::route_tables(std::size_t bytes) {
  Result<std::byte*> tables = ensure(tables_[next_tables_], bytes);
  if (tables.ok()) next_tables_ = 1 - next_tables_;
  return tables;
}

Result<std::byte*> Staging::records(std::size_t bytes) { return ensure(records_, bytes); }

Result<std::byte*> Staging::rows(std::size_t bytes) { return ensure(rows_, bytes); }

Status Staging::check_room_for_rows(std::size_t bytes) const {
  const std::size_t free_bytes = arena_->largest_free_bytes();
  if (bytes <= rows_.size_bytes() || bytes <= free_bytes) return {};
  return Status(
      ErrorCode::kCapacity,
      fmt::format("rows that peers cannot reach need {} bytes of staging, but the arena's largest free range is {}; "
                  "put them in memory from Group::allocate, or raise GroupOptions::arena_bytes",
                  bytes, free_bytes));
}

std::size_t Staging::held_bytes() const {
  return round_up_to_page(tables_[0].size_bytes()) + round_up_to_page(tables_[1].size_bytes()) +
         round_up_to_page(records_.size_bytes()) + round_up_to_page(rows_.size_bytes());
}

}  // namespace ferry::cpu
