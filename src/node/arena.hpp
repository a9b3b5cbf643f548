#ifndef FERRY_NODE_ARENA_HPP
#define FERRY_NODE_ARENA_HPP

/// A rank's memory that peers can reach: an anonymous memory file (memfd), so nothing is left behind however a rank
/// ends. It starts with the ControlBlock; behind it is a heap of pages, taken from the system when allocated and
/// returned when freed. The whole file is mapped once, at its full (sparse) size, so that peers need not be notified
/// when it grows.

#include <cstddef>
#include <memory>
#include <mutex>

#include "core/forks.hpp"
#include "core/unique_fd.hpp"
#include "ferry/group.hpp"
#include "ferry/status.hpp"
#include "node/control_block.hpp"
#include "node/page_heap.hpp"

namespace ferry::node {

/// Size of the control block at the start of every arena, in whole pages.
inline constexpr std::size_t kControlBytes = round_up_to_page(sizeof(ControlBlock));

/// A mapped arena: this rank's own, or a peer's.
class ArenaMapping {
 public:
  /// Map the arena behind `fd`. Refuses a file that could shrink later (its owner could then crash this process by
  /// truncating it), that is smaller than a control block, or that has another layout.
  static Result<std::shared_ptr<ArenaMapping>> map_peer(UniqueFd fd);

  ArenaMapping(UniqueFd fd, std::byte* base, std::size_t size_bytes)
      : fd_(std::move(fd)), base_(base), size_bytes_(size_bytes) {}
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;
  ~ArenaMapping();

  int fd() const { return fd_.get(); }
  std::byte* base() const { return base_; }
  std::size_t size_bytes() const { return size_bytes_; }
  ControlBlock& control() const { return *reinterpret_cast<ControlBlock*>(base_); }
  /// Whether [data, data + bytes) is inside the mapping.
  bool contains(const void* data, std::size_t bytes) const;

 private:
  UniqueFd fd_;
  std::byte* base_;
  std::size_t size_bytes_;
};

/// This rank's own arena: the mapping and its heap. Blocks keep it alive.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Create an arena with room for `heap_bytes`; at first only the control block takes memory.
  static Result<std::shared_ptr<Arena>> create(std::size_t heap_bytes);

  explicit Arena(std::shared_ptr<ArenaMapping> mapping);

  const std::shared_ptr<ArenaMapping>& mapping() const { return mapping_; }

  /// Allocate `bytes` of zeroed memory at a page boundary; freed with the Buffer. Callable from any thread, as are the
  /// two below.
  /// @errors kCapacity: no such range is free; kSystem: the machine is out of memory
  Result<Buffer> allocate(std::size_t bytes);
  /// allocate without an owner: freed by `give`, or with the last mapping.
  Result<std::byte*> take(std::size_t bytes);
  void give(std::byte* data, std::size_t bytes);
  /// Largest block that `allocate` can return now.
  std::size_t largest_free_bytes() const;
  /// Bytes taken, rounded up to pages.
  std::size_t allocated_bytes() const;

 private:
  std::shared_ptr<ArenaMapping> mapping_;
  mutable std::mutex mutex_;
  PageHeap heap_;                    // guarded by mutex_
  std::size_t allocated_bytes_ = 0;  // guarded by mutex_
  const int num_forks_ = num_forks();
};

}  // namespace ferry::node

#endif  // FERRY_NODE_ARENA_HPP
