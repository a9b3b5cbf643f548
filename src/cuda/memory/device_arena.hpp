#ifndef FERRY_CUDA_MEMORY_DEVICE_ARENA_HPP
#define FERRY_CUDA_MEMORY_DEVICE_ARENA_HPP

/// A rank's GPU memory that peers can reach: one range of addresses, reserved once, that never moves. Physical memory
/// backs its start, [0, backed_bytes), and grows in chunks as memory is allocated. Each chunk is announced to the peers
/// before any of it is handed out. Freed memory stays backed until the arena is destroyed, because a late peer may
/// still write to it.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "cuda/driver/driver.hpp"
#include "cuda/driver/own_stream.hpp"
#include "cuda/memory/deferred_free.hpp"
#include "ferry/status.hpp"
#include "node/page_heap.hpp"

namespace ferry::cuda {

/// Mechanism by which other processes access the memory. The values are sent between processes.
enum class MemoryPath : std::int32_t {
  kVmm = 0,  ///< cuMem* memory, whose handles are passed as file descriptors
  kIpc = 1,  ///< cudaMalloc memory and cudaIpc handles: one chunk, no growth
};

/// "vmm" or "ipc".
std::string_view to_string(MemoryPath path);

/// Environment variable that forces a path by its name, for systems where the choice below is wrong.
inline constexpr const char* kMemoryPathVariable = "FERRY_CUDA_MEMORY";

/// kVmm if the device, the driver and the sandbox around this process allow memory to be shared as file descriptors,
/// unless kMemoryPathVariable says otherwise.
/// @errors kInvalidArgument: the variable names no path; kUnsupported: it names kVmm, which does not work here
Result<MemoryPath> choose_memory_path(int device);

/// Largest arena of kIpc, whose memory is allocated all at once.
inline constexpr std::size_t kMaxIpcArenaBytes = std::size_t{2} << 30;

/// Largest arena of either path: half of x86-64's user address space.
inline constexpr std::size_t kMaxDeviceArenaBytes = std::size_t{1} << 46;

/// A piece of an arena's memory, as announced to the peers.
struct ArenaChunk {
  std::size_t offset = 0;  ///< from the arena's base
  std::size_t size_bytes = 0;
  int fd = -1;               ///< kVmm: valid during the call that delivers it
  cudaIpcMemHandle_t ipc{};  ///< kIpc
};

class DeviceArena : public std::enable_shared_from_this<DeviceArena> {
  struct Private {};  // lets only `create` construct

 public:
  /// Reserves `size_bytes` of addresses for memory of `device`, rounded up to the device's granularity. kVmm allocates
  /// no memory yet. kIpc allocates the smaller of that and kMaxIpcArenaBytes at once.
  /// Memory is zeroed on `stream`, which must not wait for any other work.
  /// `head_bytes`: kVmm backs as much at the start by a chunk of its own, the *head*. The caller takes all of it first,
  /// then calls seal_head.
  /// @errors kInvalidArgument: absurd size or device; kUnsupported; kSystem: device memory ran out; kCuda
  static Result<std::shared_ptr<DeviceArena>> create(int device, std::size_t size_bytes, MemoryPath path,
                                                     std::shared_ptr<OwnStream> stream, std::size_t head_bytes = 0);

  DeviceArena(Private, int device, MemoryPath path, std::shared_ptr<OwnStream> stream)
      : device_(device), path_(path), stream_(std::move(stream)) {}
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  int device() const { return device_; }
  MemoryPath path() const { return path_; }
  std::byte* base() const { return base_; }
  std::size_t size_bytes() const { return size_bytes_; }
  /// Whether [data, data + bytes) lies inside.
  bool contains(const void* data, std::size_t bytes) const;

  /// Whether `data` points at memory of this arena, handed out or not, rather than at addresses without memory.
  bool is_backed_at(const void* data) const {
    const auto* byte = static_cast<const std::byte*>(data);
    return byte >= base_ && byte < base_ + backed_bytes();
  }

  /// Announces a chunk to the peers, and returns when all can use it. An error undoes the growth, so the callee must
  /// withdraw its announcement.
  using Announce = std::function<Status(const ArenaChunk&)>;
  /// Calls `announce` for each existing chunk, and from then on for each new chunk before any of it is handed out; an
  /// empty function ends that. After an error nothing is set. Waits for a growth in progress.
  Status set_announce(Announce announce);

  /// Nothing that is taken from now on lies in the head.
  void seal_head();
  /// Replaces the memory of the head by other, zeroed memory at the same addresses. Processes that still map the former
  /// memory reach nothing of this one. No work may use the head, and announcements must have ended (set_announce).
  /// @errors kUnsupported: there is no head; kSystem: device memory ran out; kCuda. The head may then be without memory
  ///         until it is renewed
  Status renew_head();

  /// kIpc: processes that will open the memory. It is not freed before they have closed it.
  void set_importers(Importers importers) { importers_ = std::move(importers); }

  /// Lets another GPU of this process use the arena, now and as it grows.
  Status grant_access(int device);

  /// Allocates `bytes` at a page boundary, with undefined content; `give`, or the end of the arena, frees them. Safe
  /// from any thread, as are the next two, also while streams are being captured. Waits for the peers if the arena
  /// grows.
  /// @errors kCapacity: no such range is free; kSystem: device memory ran out; kCuda; those of `announce`
  Result<std::byte*> take(std::size_t bytes);
  void give(std::byte* data, std::size_t bytes);
  /// Zeroes allocated memory, and waits for that. Never captured.
  Status zero(std::byte* data, std::size_t bytes) const;

  /// Bytes allocated, rounded up to pages.
  std::size_t allocated_bytes() const;
  /// Largest block for which the address range has room now; the device may have less memory.
  std::size_t largest_free_bytes() const;
  /// Device memory that this arena holds.
  std::size_t backed_bytes() const { return backed_bytes_.load(std::memory_order_acquire); }

 private:
  struct Chunk {
    std::size_t offset = 0;
    std::size_t size_bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
  };

  Status reserve(std::size_t size_bytes, std::size_t head_bytes);
  Status reserve_vmm(std::size_t size_bytes, std::size_t head_bytes);
  Status reserve_ipc(std::size_t size_bytes);
  Status back(std::size_t end);
  Result<Chunk> map_chunk(std::size_t offset, std::size_t size_bytes) const;
  Result<CUmemGenericAllocationHandle> take_memory(std::size_t size_bytes) const;
  Status map_at(const Chunk& chunk) const;
  Status back_head(std::size_t bytes);
  Result<CUmemGenericAllocationHandle> replace_memory(Chunk& head) const;
  Status open_access(const Chunk& chunk) const;
  void unmap_chunk(const Chunk& chunk) const;
  Status announce_chunk(const Announce& announce, const Chunk& chunk) const;

  const int device_;
  const MemoryPath path_;
  const std::shared_ptr<OwnStream> stream_;
  std::byte* base_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t granularity_ = 0;
  bool has_head_ = false;  // the first of chunks_ is the head

  Importers importers_;

  mutable std::mutex heap_mutex_;
  node::PageHeap heap_{0};           // guarded by heap_mutex_
  std::size_t allocated_bytes_ = 0;  // guarded by heap_mutex_

  // Held while peers map a new chunk. They map it on their own threads, which never take this lock, so ranks may grow
  // at the same time.
  std::mutex growth_mutex_;
  std::vector<Chunk> chunks_;                 // guarded by growth_mutex_; back to back from offset 0
  std::vector<int> granted_;                  // guarded by growth_mutex_: other GPUs of this process that use the arena
  Announce announce_;                         // guarded by growth_mutex_
  std::atomic<std::size_t> backed_bytes_{0};  // written under growth_mutex_, once every peer can use the memory
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_DEVICE_ARENA_HPP
