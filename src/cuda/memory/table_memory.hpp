#ifndef FERRY_CUDA_MEMORY_TABLE_MEMORY_HPP
#define FERRY_CUDA_MEMORY_TABLE_MEMORY_HPP

/// Device memory of Routings, of the backend's staging, and of the program's Buffers. Earlier calls may still use a
/// block when its owner is destroyed. Blocks are therefore held back until the last call launched before is finished:
/// otherwise the next owner, or the zeroing for it, would overlap with those calls.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/memory/device_arena.hpp"
#include "ferry/group.hpp"
#include "ferry/status.hpp"

namespace ferry::cuda {

class TableMemory : public std::enable_shared_from_this<TableMemory> {
 public:
  static Result<std::shared_ptr<TableMemory>> create(std::shared_ptr<DeviceArena> arena);

  /// Takes ownership of the events.
  TableMemory(std::shared_ptr<DeviceArena> arena, std::array<cudaEvent_t, 2> events)
      : arena_(std::move(arena)), events_(events) {}
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;
  ~TableMemory();

  /// Allocates a block, which is freed with the last copy of the pointer, from any thread.
  /// `again`: for calls directly after another allocation, or before look_through: blocks held back are then looked
  /// through only if memory is short.
  Result<std::shared_ptr<std::byte>> take(std::size_t bytes, bool again = false);
  /// Variant of take for a block that only kernels of this group's calls use, and no graph. Once its owner is
  /// destroyed, the next such block of the same size may reuse the memory at once, because later calls run after those
  /// that used it. A program that makes many calls ahead of the GPU thus takes no extra memory, and its host makes no
  /// driver calls for this.
  Result<std::shared_ptr<std::byte>> take_for_calls(std::size_t bytes);
  /// Makes a block of `take` shorter. No call may use the part that is cut off.
  void shrink(const std::shared_ptr<std::byte>& block, std::size_t bytes);
  /// Variant of take for a block followed by spare bytes, if there is memory for them. The spare bytes are freed when
  /// memory is short, unless `use` has made them part of the block.
  Result<std::shared_ptr<std::byte>> take_with_spare(std::size_t bytes, std::size_t spare_bytes);
  /// Whether a block has room for `bytes`, which belong to it from now on.
  bool use(const std::shared_ptr<std::byte>& block, std::size_t bytes);
  /// Allocates a zeroed block for the program; the Buffer keeps this object alive.
  /// @errors those of DeviceArena::take; kCuda
  Result<Buffer> allocate(std::size_t bytes);
  /// Runs `release` when the calls launched before are finished; from any thread.
  void after_calls(std::function<void()> release);
  /// Releases the blocks held back by calls that are finished.
  void release_finished();
  /// Step that `take` does first, unless `again` is set.
  void look_through();
  /// Bytes allocated and not yet returned to the arena, in pages. First returns the blocks that no call uses any more.
  std::size_t held_bytes();

  /// Must be called after every call that is not captured, on its stream.
  cudaError_t record_last_call(cudaStream_t stream);
  /// Event that the last record_last_call recorded.
  cudaEvent_t last_call() const;
  /// Called when no more calls will be launched and all have finished: blocks held back are freed, and later ones at
  /// once.
  void close();

 private:
  /// Deleter of a block.
  struct Bury {
    std::shared_ptr<TableMemory> memory;
    std::size_t bytes = 0;       // guarded by mutex_
    std::size_t used_bytes = 0;  // guarded by mutex_; without the spare bytes
    /// Releases the memory. A weak pointer to the block keeps this deleter alive.
    void operator()(std::byte* block) {
      const std::shared_ptr<TableMemory> owner = std::move(memory);
      owner->bury(block, bytes);
    }
  };

  /// Deleter of a block of take_for_calls.
  struct Keep {
    std::shared_ptr<TableMemory> memory;
    std::size_t bytes = 0;
    void operator()(std::byte* block) const { memory->keep(block, bytes); }
  };
  struct Kept {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  static Bury& owner_of(const std::shared_ptr<std::byte>& block) { return *std::get_deleter<Bury>(block); }
  /// Cuts a block off after `bytes`. Called under the lock.
  void cut(std::byte* data, Bury& owner, std::size_t bytes);
  void give_back_spare();
  /// Allocates from the arena, after returning the blocks held back as far as possible.
  Result<std::byte*> take_block(std::size_t bytes, bool again);
  void bury(std::byte* data, std::size_t bytes);
  void keep(std::byte* data, std::size_t bytes);
  /// A kept block of that size; null if there is none.
  std::byte* take_kept(std::size_t bytes);
  void bury_buffer(std::byte* data, std::size_t bytes);
  void reap();
  enum class Unused { kResting, kKeptToo };
  /// Releases the blocks that no call uses any more.
  void release_unused(Unused what);
  std::size_t num_resting() const { return resting_.size() + resting_earlier_.size(); }
  void release_resting();
  void release_kept();
  void release_all();

  std::shared_ptr<DeviceArena> arena_;
  const std::array<cudaEvent_t, 2> events_;
  mutable std::mutex mutex_;
  /// Number of blocks that may be held back before a call that takes a kept block looks for finished calls: asking the
  /// driver whether a call is finished takes as long as a third of a call.
  static constexpr std::size_t kMostUnseen = 64;

  std::size_t last_ = 0;  // guarded by mutex_; index of the event recorded last
  /// Releases held back until the last call is finished. Guarded by mutex_.
  std::vector<std::function<void()>> resting_;
  /// Releases held back until an earlier call is finished, whose event is not recorded again before that. A program
  /// that is always ahead of its GPU would never find its last call finished, and would take new memory for every call.
  /// Guarded by mutex_.
  std::vector<std::function<void()>> resting_earlier_;
  std::size_t earlier_ = 0;                           // guarded by mutex_; index of the event of that call
  std::size_t look_at_ = kMostUnseen;                 // guarded by mutex_; number of blocks held back at which the next
                                                      // call looks
  std::vector<Kept> kept_;                            // guarded by mutex_
  std::vector<std::weak_ptr<std::byte>> with_spare_;  // guarded by mutex_
  std::size_t held_bytes_ = 0;                        // guarded by mutex_
  bool closed_ = false;                               // guarded by mutex_
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_TABLE_MEMORY_HPP
