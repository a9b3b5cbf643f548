#ifndef FERRY_CUDA_SYNC_WIDE_WORD_CUH
#define FERRY_CUDA_SYNC_WIDE_WORD_CUH

/// Replaces src/cuda/sync/wide_word.cuh where kernels are emulated: no other thread runs between the two halves.

#include "emulator/emulator.hpp"

namespace ferry::cuda::device {

struct WideWord {
  std::uint64_t low;
  std::uint64_t high;
};

inline WideWord load_wide_relaxed_system(const WideWord* address) {
  emulator::poll();
  return *address;
}

inline void store_wide_relaxed_system(WideWord* address, const WideWord& word) {
  emulator::about_to_store();
  *address = word;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WIDE_WORD_CUH
