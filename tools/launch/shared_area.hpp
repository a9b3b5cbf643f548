#ifndef FERRY_TOOLS_LAUNCH_SHARED_AREA_HPP
#define FERRY_TOOLS_LAUNCH_SHARED_AREA_HPP

/// Anonymous memory that a parent maps before it forks, so that its children can return results and start together. It
/// has no name: nothing remains after the processes have ended in any way.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/status.hpp"

namespace ferry::launch {

/// Mapping shared with the children of this process. Move-only owner.
class SharedArea {
 public:
  SharedArea() = default;
  /// @errors kSystem
  static Result<SharedArea> map(std::size_t size_bytes);
  SharedArea(SharedArea&& other) noexcept;
  SharedArea& operator=(SharedArea&& other) noexcept;
  SharedArea(const SharedArea&) = delete;
  SharedArea& operator=(const SharedArea&) = delete;
  ~SharedArea();

  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(data_), size_bytes_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

/// Barrier of processes, which sleep while they wait. It is placed in a SharedArea; zeroed memory is its initial state.
/// A process that dies in it leaves no lock behind: the others time out, or their parent kills them. `generation_`
/// publishes: every write made before any arrival is visible to all after the wait.
class SharedBarrier {
 public:
  /// @errors kTimeout
  Status wait(std::uint32_t num_ranks, std::int64_t timeout_ns);
  /// Time (now_ns) at which the last rank arrived, the same for all. Valid between this wait and the next.
  std::int64_t released_ns() const { return released_ns_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint32_t> num_arrived_{0};
  std::atomic<std::uint32_t> generation_{0};
  std::atomic<std::int64_t> released_ns_{0};  // published by generation_
};
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "the barrier is used by several processes");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "the barrier is used by several processes");

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_SHARED_AREA_HPP
