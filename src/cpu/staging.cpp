#include "cpu/staging.hpp"

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

Result<std::byte*> Staging::exchange(std::size_t bytes) { return ensure(exchange_, bytes); }

std::size_t Staging::held_bytes() const {
  return round_up_to_page(tables_[0].size_bytes()) + round_up_to_page(tables_[1].size_bytes()) +
         round_up_to_page(exchange_.size_bytes());
}

}  // namespace ferry::cpu
