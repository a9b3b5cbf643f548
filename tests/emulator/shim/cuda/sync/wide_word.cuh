#ifndef FERRY_CUDA_SYNC_WIDE_WORD_CUH
#define FERRY_CUDA_SYNC_WIDE_WORD_CUH

/// Replaces src/cuda/sync/wide_word.cuh where kernels are emulated: whoever sees the upper half of a word, which tells
/// that it is there, sees the lower. Other emulated GPUs and cards write in that order.

#include <atomic>

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

struct WideWord {
  std::uint64_t low;
  std::uint64_t high;
};

inline WideWord load_wide_relaxed_system(const WideWord* address) {
  emulator::poll();
  auto& word = const_cast<WideWord&>(*address);
  WideWord seen;
  seen.high = std::atomic_ref(word.high).load(std::memory_order_acquire);
  seen.low = std::atomic_ref(word.low).load(std::memory_order_relaxed);
  return seen;
}

inline void store_wide_relaxed_system(WideWord* address, const WideWord& word) {
  emulator::about_to_store();
  std::atomic_ref(address->low).store(word.low, std::memory_order_relaxed);
  std::atomic_ref(address->high).store(word.high, std::memory_order_release);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WIDE_WORD_CUH
