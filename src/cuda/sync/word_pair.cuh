#ifndef FERRY_CUDA_SYNC_WORD_PAIR_CUH
#define FERRY_CUDA_SYNC_WORD_PAIR_CUH

/// Two words of 8 bytes that one instruction moves. Each word is moved as a whole; the order of the two is undefined
/// (PTX ISA, "Memory Consistency Model", vector data types). The address is a multiple of 16.

#include <cstdint>

namespace ferry::cuda::device {

struct WordPair {
  std::uint64_t first;
  std::uint64_t second;
};

__device__ inline WordPair load_pair_relaxed_system(const std::uint64_t* address) {
  WordPair pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(address)
               : "memory");
  return pair;
}

__device__ inline void store_pair_relaxed_system(std::uint64_t* address, const WordPair& pair) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pair.first), "l"(pair.second)
               : "memory");
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WORD_PAIR_CUH
