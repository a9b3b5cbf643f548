#ifndef FERRY_PYTHON_SYMMETRIC_POOL_HPP
#define FERRY_PYTHON_SYMMETRIC_POOL_HPP

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ferry/group.hpp"

namespace ferry::python {

/// Symmetric memory of a GPU group in large segments, which torch's caching allocator cuts up: tensors are then reused
/// in stream order, as all of torch's are, without a word to the host. torch takes and gives back segments by
/// `ferry_segment_alloc` and `ferry_segment_free`, two C functions of this module.
class SymmetricPool : public std::enable_shared_from_this<SymmetricPool> {
 public:
  explicit SymmetricPool(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;
  ~SymmetricPool() = default;

  /// From now on segments that this thread takes come from here, until `leave`.
  void enter();
  static void leave();

  /// Null where there is no room; `take_error` then says why.
  void* take(std::size_t bytes);
  /// What the last `take` that failed had to say, once.
  Status take_error();
  /// Kernels may still use a segment that torch gives back, so it rests.
  void rest(Buffer segment);
  /// Gives back what rests. The GPU must be idle.
  void reclaim();

 private:
  std::shared_ptr<Group> group_;
  std::mutex mutex_;
  Status error_;                 // guarded by mutex_
  std::vector<Buffer> resting_;  // guarded by mutex_
};

}  // namespace ferry::python

#endif  // FERRY_PYTHON_SYMMETRIC_POOL_HPP
