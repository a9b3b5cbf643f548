#ifndef FERRY_PYTHON_SYMMETRIC_POOL_HPP
#define FERRY_PYTHON_SYMMETRIC_POOL_HPP

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ferry/group.hpp"

namespace ferry::python {

/// Symmetric memory of a GPU group in segments, which torch's caching allocator divides up: memory is then reused in
/// stream order, as for all of torch's tensors, without involving the host. torch allocates and frees segments with
/// `ferry_segment_alloc` and `ferry_segment_free`, two C functions of this module.
///
/// The group's memory is taken in steps as large as the memory held already: a step costs milliseconds, since all ranks
/// map it, and a program that queues many calls ahead needs a segment for each until the first of them is done.
class SymmetricPool : public std::enable_shared_from_this<SymmetricPool> {
 public:
  /// Part of the group's memory, with its free ranges.
  class Chunk {
   public:
    explicit Chunk(Buffer buffer);
    std::size_t size_bytes() const { return buffer_.size_bytes(); }
    std::byte* at(std::size_t offset) const { return static_cast<std::byte*>(buffer_.data()) + offset; }
    bool is_unused() const;
    std::optional<std::size_t> take(std::size_t bytes);
    void give(std::size_t offset, std::size_t bytes);

   private:
    Buffer buffer_;
    std::map<std::size_t, std::size_t> free_;  // offset -> bytes; neighbours are one range
  };

  /// Memory that torch has: a range of a chunk, which lives at least as long.
  struct Segment {
    std::weak_ptr<SymmetricPool> pool;
    std::shared_ptr<Chunk> chunk;
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };

  explicit SymmetricPool(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;
  ~SymmetricPool() = default;

  /// From now on segments that this thread allocates come from this pool, until `leave`.
  void enter();
  static void leave();

  /// Memory of the group itself, past the pool.
  Result<Buffer> allocate(std::size_t bytes) { return group_->allocate(bytes); }

  /// Null if there is no room; `take_error` then returns why.
  void* take(std::size_t bytes);
  /// Returns and clears the error of the last failed `take`.
  Status take_error();
  /// Takes a segment that torch has freed. Kernels may still use it, so it is kept until `reclaim`.
  void retire(Segment segment);
  /// Frees the retired segments, for other segments and, chunk by chunk, for the group. The GPU must be idle.
  void reclaim();

 private:
  std::optional<Segment> take_from_chunks(std::size_t bytes);
  Status grow(std::size_t bytes);

  std::shared_ptr<Group> group_;
  std::mutex mutex_;
  Status error_;                                // guarded by mutex_
  std::vector<std::shared_ptr<Chunk>> chunks_;  // guarded by mutex_, as are their free ranges
  std::vector<Segment> retired_;                // guarded by mutex_
};

}  // namespace ferry::python

#endif  // FERRY_PYTHON_SYMMETRIC_POOL_HPP
