#ifndef FERRY_CUDA_MEMORY_PEER_MAPPING_HPP
#define FERRY_CUDA_MEMORY_PEER_MAPPING_HPP

/// The device arena of a rank in another process, as mapped into this process: a range of addresses that never moves,
/// into which each chunk is mapped when the peer announces it.

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "cuda/memory/device_arena.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

/// @thread one call at a time; base() at any time
class PeerMapping {
  struct Private {};  // lets only `create` construct

 public:
  /// Reserves addresses for an arena of `size_bytes`, for use from `device` (this rank's GPU).
  static Result<std::unique_ptr<PeerMapping>> create(int device, MemoryPath path, std::size_t size_bytes);

  PeerMapping(Private, int device, MemoryPath path, std::size_t size_bytes)
      : device_(device), path_(path), size_bytes_(size_bytes) {}
  /// No work of this process may still use the memory.
  ~PeerMapping();
  PeerMapping(const PeerMapping&) = delete;
  PeerMapping& operator=(const PeerMapping&) = delete;

  MemoryPath path() const { return path_; }
  std::size_t size_bytes() const { return size_bytes_; }

  /// Unmaps everything, so that the arena of another process can be mapped at the same addresses. kVmm only.
  void clear();
  /// Maps memory of this rank's GPU in place of the first `bytes` of an arena that is not there, for stores that no
  /// rank reads. kVmm only.
  Status stand_in(std::size_t bytes);

  /// Constant once set. kVmm: from creation; kIpc: null until the arena's only chunk is mapped.
  std::byte* base() const { return base_.load(std::memory_order_acquire); }

  /// Maps an announced chunk. Any announcement of a faulty peer affects only the next free part of that peer's range.
  /// @errors kTransport: not the next chunk; kSystem, kCuda: the driver refused
  Status add(const ArenaChunk& chunk);
  /// Unmaps the newest chunk, if it starts at `offset`: its owner could not announce it to all ranks.
  void take_back(std::size_t offset);

 private:
  Status add_vmm(const ArenaChunk& chunk);
  Status add_ipc(const ArenaChunk& chunk);
  Status map_handle(CUmemGenericAllocationHandle handle, std::size_t offset, std::size_t size_bytes);
  void unmap_newest();

  struct Extent {
    std::size_t offset = 0;
    std::size_t size_bytes = 0;
  };

  const int device_;
  const MemoryPath path_;
  const std::size_t size_bytes_;
  std::size_t granularity_ = 1;
  std::atomic<std::byte*> base_{nullptr};
  std::vector<Extent> chunks_;  // back to back from offset 0
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_PEER_MAPPING_HPP
