#ifndef FERRY_CUDA_SYNC_CLAIM_CUH
#define FERRY_CUDA_SYNC_CLAIM_CUH

#include <cstdint>

namespace ferry::cuda::device {

/// Takes the next number of a counter that all warps of the GPU share. Called by lane 0 alone. The wait for the result
/// is at the first use of the number.
__device__ inline std::uint32_t claim(std::uint32_t* num_claimed) {
  std::uint32_t number;
  // The lane number keeps the summands different: the compiler merges equal summands of converged lanes into one sum,
  // and then waits for the result in order to share it.
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
