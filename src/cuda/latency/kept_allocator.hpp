#ifndef FERRY_CUDA_LATENCY_KEPT_ALLOCATOR_HPP
#define FERRY_CUDA_LATENCY_KEPT_ALLOCATOR_HPP

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace ferry::cuda {

/// Keeps the memory of objects that every call makes and drops, for later objects of the process. They are larger than
/// what the C library's allocator keeps per thread, and it takes several times as long for such sizes.
template <typename T>
class KeptAllocator {
 public:
  using value_type = T;

  KeptAllocator() = default;
  template <typename Other>
  KeptAllocator(const KeptAllocator<Other>& /*other*/) {}  // NOLINT(google-explicit-constructor)

  T* allocate(std::size_t count) {
    if (count != 1) return std::allocator<T>().allocate(count);
    Blocks& all = blocks();
    {
      const std::lock_guard lock(all.mutex);
      if (!all.idle.empty()) {
        T* const block = all.idle.back();
        all.idle.pop_back();
        return block;
      }
    }
    return std::allocator<T>().allocate(1);
  }

  void deallocate(T* block, std::size_t count) {
    if (count == 1) {
      Blocks& all = blocks();
      const std::lock_guard lock(all.mutex);
      if (all.idle.size() < kMostIdle) {
        all.idle.push_back(block);  // never reallocates: kMostIdle are reserved
        return;
      }
    }
    std::allocator<T>().deallocate(block, count);
  }

  friend bool operator==(const KeptAllocator& /*a*/, const KeptAllocator& /*b*/) { return true; }

 private:
  /// Number of objects that a program makes ahead of its GPU before it reads one of them.
  static constexpr std::size_t kMostIdle = 64;
  struct Blocks {
    Blocks() { idle.reserve(kMostIdle); }
    std::mutex mutex;
    std::vector<T*> idle;  // guarded by mutex
  };

  /// Never destroyed: the last object may outlive static ones.
  static Blocks& blocks() {
    static auto* const all = new Blocks;
    return *all;
  }
};

}  // namespace ferry::cuda

#endif  // FERRY_CUDA_LATENCY_KEPT_ALLOCATOR_HPP
