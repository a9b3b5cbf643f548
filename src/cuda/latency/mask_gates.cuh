#ifndef FERRY_CUDA_LATENCY_MASK_GATES_CUH
#define FERRY_CUDA_LATENCY_MASK_GATES_CUH

/// The gate before a send half, by one block.

#include "cuda/latency/mask.cuh"

namespace ferry::cuda::device {

/// Waits for the sets in which ranks receive call `number`, and writes them to the shadow. All threads of the block.
__device__ inline void wait_for_grants(const LatencyParams& call, const MaskParams& mask, LatencyKind kind,
                                       std::uint64_t number) {
  if (is_broken(call.ranks)) return;  // the half finds that too
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks.num_ranks; rank += static_cast<int>(blockDim.x)) {
    Payload set{kNoSet, true};
    if (!mask_if_masked_by(call, mask, rank)) {
      set = look_or_mask(call, mask, {Awaited::kDone, rank, number},
                         grant_word(call, call.ranks.rank, kind, rank, number));
    }
    if (is_masked(mask, rank)) set = {kNoSet, true};
    if (set.came) post_word(shadow_grant(call, mask, kind, rank, number), number, set.value);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_MASK_GATES_CUH
