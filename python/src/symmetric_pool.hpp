#ifndef FERRY_PYTHON_SYMMETRIC_POOL_HPP
#define FERRY_PYTHON_SYMMETRIC_POOL_HPP

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ferry/group.hpp"

namespace ferry::python {

/// Symmetric memory of a GPU group in large segments, which torch's caching allocator divides up: memory is then reused
/// in stream order, as for all of torch's tensors, without involving the host. torch allocates and frees segments with
/// `ferry_segment_alloc` and `ferry_segment_free`, two C functions of this module.
class SymmetricPool : public std::enable_shared_from_this<SymmetricPool> {
 public:
  explicit SymmetricPool(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  SymmetricPool(const SymmetricPool&) = delete;
  SymmetricPool& operator=(const SymmetricPool&) = delete;
  ~SymmetricPool() = default;

  /// From now on segments that this thread allocates come from this pool, until `leave`.
  void enter();
  static void leave();

  /// Null if there is no room; `take_error` then returns why.
  void* take(std::size_t bytes);
  /// Returns and clears the error of the last failed `take`.
  Status take_error();
  /// Takes a segment that torch has freed. Kernels may still use it, so it is kept until `reclaim`.
  void retire(Buffer segment);
  /// Frees the retired segments. The GPU must be idle.
  void reclaim();

 private:
  std::shared_ptr<Group> group_;
  std::mutex mutex_;
  Status error_;                 // guarded by mutex_
  std::vector<Buffer> retired_;  // guarded by mutex_
};

}  // namespace ferry::python

#endif  // FERRY_PYTHON_SYMMETRIC_POOL_HPP
