#ifndef FERRY_CUDA_SYNC_WORD_PAIR_CUH
#define FERRY_CUDA_SYNC_WORD_PAIR_CUH

/// In place of src/cuda/sync/word_pair.cuh where kernels are emulated: others may come between the two words.

#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

struct WordPair {
  std::uint64_t first;
  std::uint64_t second;
};

inline WordPair load_pair_relaxed_system(const std::uint64_t* address) {
  const std::uint64_t first = load_relaxed_system(address);
  return {first, load_relaxed_system(address + 1)};
}

inline void store_pair_relaxed_system(std::uint64_t* address, const WordPair& pair) {
  store_relaxed_system(address + 1, pair.second);
  store_relaxed_system(address, pair.first);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WORD_PAIR_CUH
