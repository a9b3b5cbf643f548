#ifndef FERRY_CUDA_SYNC_CLAIM_CUH
#define FERRY_CUDA_SYNC_CLAIM_CUH

#include <cstdint>

namespace ferry::cuda::device {

/// Takes the next number of a count that all warps of the GPU share. Lane 0 alone; it waits where it uses the number.
__device__ inline std::uint32_t claim(std::uint32_t* num_claimed) {
  std::uint32_t number;
  // Of equal summands the compiler makes one sum for the lanes that come to it, and waits for the result to share it.
  std::uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(number)
               : "l"(num_claimed), "r"(lane + 1)
               : "memory");
  return number;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_SYNC_CLAIM_CUH
