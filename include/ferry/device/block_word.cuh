#ifndef FERRY_DEVICE_BLOCK_WORD_CUH
#define FERRY_DEVICE_BLOCK_WORD_CUH

#include <cstdint>

namespace ferry::device {

/// Word in the block's shared memory by which the first thread hands a value to all threads. Not initialised.
__device__ inline std::uint64_t& block_word() {
  __shared__ std::uint64_t word;
  return word;
}

}  // namespace ferry::device

#endif  // FERRY_DEVICE_BLOCK_WORD_CUH
