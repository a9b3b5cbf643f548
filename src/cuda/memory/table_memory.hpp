#ifndef FERRY_CUDA_MEMORY_TABLE_MEMORY_HPP
#define FERRY_CUDA_MEMORY_TABLE_MEMORY_HPP

/// Device memory of Routings, of the backend's staging, and of the program's Buffers. Calls that were launched earlier
/// may still use a block when its owner dies, so blocks rest until the last call that was launched before is finished:
/// whoever gets one next, or the zeroing for him, would meet those calls in it.

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

  /// Destroys the events.
  TableMemory(std::shared_ptr<DeviceArena> arena, std::array<cudaEvent_t, 2> events)
      : arena_(std::move(arena)), events_(events) {}
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;
  ~TableMemory();

  /// Freed with the last copy of the pointer, from any thread.
  /// `again`: right after another block, or before look_through, so that what rests is looked through only if memory is
  /// short.
  Result<std::shared_ptr<std::byte>> take(std::size_t bytes, bool again = false);
  /// As take, for a block that only kernels of this group's calls use, and no graph: the next such block of its size
  /// may be the same as soon as its owner dies, because later calls run behind those that used it. So a program that
  /// makes many calls ahead of the GPU takes no more memory for that, and its host asks the driver nothing.
  Result<std::shared_ptr<std::byte>> take_for_calls(std::size_t bytes);
  /// Makes a block of `take` shorter. What is cut off must be in no call's use.
  void shrink(const std::shared_ptr<std::byte>& block, std::size_t bytes);
  /// As take, of a block with spare bytes behind, where there is memory for them. They are given back when memory is
  /// short, unless `use` has made them part of the block.
  Result<std::shared_ptr<std::byte>> take_with_spare(std::size_t bytes, std::size_t spare_bytes);
  /// Whether a block has room for so many bytes, which stay with it from now on.
  bool use(const std::shared_ptr<std::byte>& block, std::size_t bytes);
  /// A block for the program, zeroed; the Buffer keeps this object alive.
  /// @errors those of DeviceArena::take; kCuda
  Result<Buffer> allocate(std::size_t bytes);
  /// Runs `release` when the calls that were launched before are finished; from any thread.
  void after_calls(std::function<void()> release);
  /// Releases what rests behind calls that are finished.
  void release_finished();
  /// What `take` does first, unless it is told not to.
  void look_through();
  /// Bytes taken and not given back to the arena yet, in pages. Gives back first what no call uses any more.
  std::size_t held_bytes();

  /// To be called after every call that is not captured, on its stream.
  cudaError_t record_last_call(cudaStream_t stream);
  /// What the last record_last_call recorded.
  cudaEvent_t last_call() const;
  /// No call will be launched any more and all have finished: what rests, and what dies later, is free at once.
  void close();

 private:
  /// The deleter of a block.
  struct Bury {
    std::shared_ptr<TableMemory> memory;
    std::size_t bytes = 0;       // guarded by mutex_
    std::size_t used_bytes = 0;  // guarded by mutex_; without what is spare
    /// Lets go of the memory: a weak pointer to the block keeps this deleter.
    void operator()(std::byte* block) {
      const std::shared_ptr<TableMemory> owner = std::move(memory);
      owner->bury(block, bytes);
    }
  };

  /// The deleter of a block of take_for_calls.
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
  /// Cuts a block off behind `bytes`. Under the lock.
  void cut(std::byte* data, Bury& owner, std::size_t bytes);
  void give_back_spare();
  /// From the arena, once what rests has been given back as far as it can be.
  Result<std::byte*> take_block(std::size_t bytes, bool again);
  void bury(std::byte* data, std::size_t bytes);
  void keep(std::byte* data, std::size_t bytes);
  /// A kept block of that size; null: none.
  std::byte* take_kept(std::size_t bytes);
  void bury_buffer(std::byte* data, std::size_t bytes);
  void reap();
  enum class Unused { kResting, kKeptToo };
  /// Releases what no call uses any more.
  void release_unused(Unused what);
  std::size_t num_resting() const { return resting_.size() + resting_earlier_.size(); }
  void release_resting();
  void release_kept();
  void release_all();

  std::shared_ptr<DeviceArena> arena_;
  const std::array<cudaEvent_t, 2> events_;
  mutable std::mutex mutex_;
  /// What may rest until a call that takes a kept block looks for it: asking the driver whether a call is finished
  /// takes as long as a third of a call.
  static constexpr std::size_t kMostUnseen = 64;

  std::size_t last_ = 0;  // guarded by mutex_; the event that was recorded last
  /// What rests until the last call is finished. Guarded by mutex_.
  std::vector<std::function<void()>> resting_;
  /// What rests until an earlier call is finished, whose event is not recorded again before. A program that is always
  /// ahead of its GPU would never find its last call finished, and take new memory for every call. Guarded by mutex_.
  std::vector<std::function<void()>> resting_earlier_;
  std::size_t earlier_ = 0;                           // guarded by mutex_; the event of that call
  std::size_t look_at_ = kMostUnseen;                 // guarded by mutex_; as many rest when the next call looks
  std::vector<Kept> kept_;                            // guarded by mutex_
  std::vector<std::weak_ptr<std::byte>> with_spare_;  // guarded by mutex_
  std::size_t held_bytes_ = 0;                        // guarded by mutex_
  bool closed_ = false;                               // guarded by mutex_
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_MEMORY_TABLE_MEMORY_HPP
