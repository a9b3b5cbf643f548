#ifndef FERRY_CUDA_SYNC_WORD_PAIR_CUH
#define FERRY_CUDA_SYNC_WORD_PAIR_CUH

/// Replaces src/cuda/sync/word_pair.cuh where kernels are emulated: other threads may run between the two words.

#include "cuda/sync/memory_order.cuh"

namespace ferry::cuda::device {

struct WordPair {
  std::uint64_t first;
  std::uint64_t second;
};

inline WordPair load_pair_relaxed_system(const std::uint64_t* address) {
  const std::uint64_t first = polled_load(address);
  return {first, polled_load(address + 1)};
}

inline void store_pair_relaxed_system(std::uint64_t* address, const WordPair& pair) {
  flag_store(address + 1, pair.second);
  flag_store(address, pair.first);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WORD_PAIR_CUH
