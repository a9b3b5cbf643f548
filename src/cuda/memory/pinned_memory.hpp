#ifndef FERRY_CUDA_MEMORY_PINNED_MEMORY_HPP
#define FERRY_CUDA_MEMORY_PINNED_MEMORY_HPP

/// Host memory that kernels write to: reports, and the results of route. One block per group, handed out in pages; a
/// later group reuses the block of a group that has ended.

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"
#include "node/page_heap.hpp"

namespace ferry::cuda {

/// Host memory that the GPUs of this process reach, zeroed. A later group reuses it after the last copy of the pointer
/// is destroyed. `kernel_view`: its address for kernels. `numa_node`: node whose memory the calling
/// thread takes (net::PreferNode), so that a block of another node is not reused; -1: any. `operation`: the call whose
/// error it is.
struct PinnedBlock {
  std::shared_ptr<std::byte> data;
  std::byte* kernel_view = nullptr;
};
Result<PinnedBlock> take_pinned(std::size_t bytes, int numa_node = -1, std::string_view operation = "Group::create");

class PinnedMemory {
 public:
  /// Creates the memory for the current GPU.
  static Result<std::shared_ptr<PinnedMemory>> create();

  PinnedMemory(std::byte* host, std::byte* device);
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory();

  /// Zeroed, unless the caller does that: the latest writes of kernels are in no cache of the host. Any thread.
  /// @errors kCapacity: too many routes whose counts have not been read
  Result<std::byte*> take(std::size_t bytes, bool zeroed = true);
  void give(std::byte* host, std::size_t bytes);
  /// Device address of `host`.
  template <typename T>
  T* on_device(T* host) const {
    return reinterpret_cast<T*>(device_ + (reinterpret_cast<std::byte*>(host) - host_));
  }

 private:
  /// Called under the lock.
  std::optional<std::size_t> take_range(std::size_t bytes);

  std::byte* host_;
  std::byte* device_;
  std::mutex mutex_;
  node::PageHeap heap_;  // guarded by mutex_
  /// Freed pages, the last one on top: most blocks are one page, and the heap is slower. Guarded by mutex_; returned to
  /// the heap when it has no room.
  std::vector<std::size_t> pages_;
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_PINNED_MEMORY_HPP
