#ifndef FERRY_CUDA_SYNC_WIDE_WORD_CUH
#define FERRY_CUDA_SYNC_WIDE_WORD_CUH

/// A word of 16 bytes that one instruction moves as a whole: PTX ISA 8.3, ld and st with the scalar type .b128, from
/// sm_70 on. The address is a multiple of 16.

#include <cstdint>

namespace ferry::cuda::device {

struct WideWord {
  std::uint64_t low;
  std::uint64_t high;
};

/// The caller uses all 16 bytes. The assembler of CUDA 13.0 makes several shorter loads of one whose bytes are not all
/// used, which may see bytes of different stores: a GPU then summed old data under a new number.
__device__ inline WideWord load_wide_relaxed_system(const WideWord* address) {
  WideWord word;
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "ld.relaxed.sys.global.b128 whole, [%2];\n"
      "mov.b128 {%0, %1}, whole;\n"
      "}"
      : "=l"(word.low), "=l"(word.high)
      : "l"(address)
      : "memory");
  return word;
}

__device__ inline void store_wide_relaxed_system(WideWord* address, const WideWord& word) {
  asm volatile(
      "{\n"
      ".reg .b128 whole;\n"
      "mov.b128 whole, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], whole;\n"
      "}" ::"l"(address),
      "l"(word.low), "l"(word.high)
      : "memory");
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_WIDE_WORD_CUH
