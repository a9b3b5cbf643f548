#ifndef FERRY_CUDA_MEMORY_STAGING_HPP
#define FERRY_CUDA_MEMORY_STAGING_HPP

/// Device memory that the backend itself uses during a call: records, rows that peers cannot reach otherwise, and rows
/// that dispatch quantises. It is kept from call to call and grows when a call needs more. Blocks that a graph has
/// captured are kept, because its replays use them again.

#include <memory>
#include <vector>

#include "cuda/memory/table_memory.hpp"

namespace ferry::cuda {

/// Kind of call that stages. Dispatch and combine use the same blocks in turn.
enum class StagedBy : unsigned { kRoute = 1, kDispatch = 2, kCombine = 4 };

class Staging {
 public:
  explicit Staging(std::shared_ptr<TableMemory> memory) : memory_(std::move(memory)) {}

  Result<std::byte*> records(StagedBy by, std::size_t bytes, bool captured) {
    return ensure(records_, by, bytes, captured);
  }
  Result<std::byte*> rows(StagedBy by, std::size_t bytes, bool captured) { return ensure(rows_, by, bytes, captured); }
  Result<std::byte*> quantized(std::size_t bytes, bool captured) {
    return ensure(quantized_, StagedBy::kDispatch, bytes, captured);
  }

  /// Memory for checksums (GroupOptions::verify).
  Result<std::byte*> checksums(StagedBy by, std::size_t bytes, bool captured) {
    return ensure(checksums_, by, bytes, captured);
  }

  /// Frees the blocks that no captured graph uses, as soon as the launched calls have finished.
  void trim() {
    for (Block* block : {&records_, &rows_, &quantized_, &checksums_}) {
      if (!block->captured) *block = {};
    }
  }

 private:
  static constexpr std::size_t kSpareShare = 8;

  struct Block {
    std::shared_ptr<std::byte> data;
    bool captured = false;
    unsigned used_by = 0;  ///< bits of StagedBy
  };

  Result<std::byte*> ensure(Block& block, StagedBy by, std::size_t bytes, bool captured) {
    const auto bit = static_cast<unsigned>(by);
    const unsigned used_by = block.used_by;
    if (block.data == nullptr || !memory_->use(block.data, bytes)) {
      // The first calls of a program may be its only ones, so they take only the bytes that they need.
      const std::size_t spare_bytes = (used_by & bit) != 0 ? bytes / kSpareShare : 0;
      if (block.captured) kept_.push_back(std::move(block.data));
      block = {};  // reset before the new block is allocated: the arena may not have room for both
      Result<std::shared_ptr<std::byte>> data = memory_->take_with_spare(bytes, spare_bytes);
      if (!data.ok()) return data.status();
      block.data = std::move(*data);
    }
    block.captured = block.captured || captured;
    block.used_by = used_by | bit;
    return block.data.get();
  }

  std::shared_ptr<TableMemory> memory_;
  Block records_;
  Block rows_;
  Block quantized_;
  Block checksums_;
  std::vector<std::shared_ptr<std::byte>> kept_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_STAGING_HPP
