#ifndef FERRY_DEVICE_BLOCK_WORD_CUH
#define FERRY_DEVICE_BLOCK_WORD_CUH

#include <cstdint>

namespace ferry::device {

/// A word that the first thread of a block has for all of them, in the block's shared memory. Not initialised.
__device__ inline std::uint64_t& block_word() {
  __shared__ std::uint64_t word;
  return word;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_BLOCK_WORD_CUH
