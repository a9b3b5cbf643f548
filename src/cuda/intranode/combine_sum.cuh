#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH

/// Summing by loads: a warp takes every n-th token and adds its rows up 16 bytes a lane, all rows of a step loaded
/// before the first is added. For devices without the bulk copy engine.

#include "cuda/intranode/combine_weights.cuh"

namespace ferry::cuda::device {

/// Tokens first, first + step, … below the number of tokens; one warp.
template <bool kFloat32>
__device__ inline void sum_by_threads(const CombineParams& params, TermFinder& finder, const ReturnedWeights& weights,
                                      Terms& terms, int first, int step) {
  for (int token = first; token < params.num_tokens; token += step) {
    const TokenEntry entry = finder.load_entry(token);
    const int num_rows = finder.find(token, entry, terms);
    if (num_rows < 0) return;
    // Not beside the rows: these need all registers.
    ReturnedWeights of_token = weights;
    of_token.fetch(token, entry.destination);
    wait_fetches();
    of_token.sum();
    std::byte* out = params.out_x + static_cast<std::int64_t>(token) * params.out_stride;
    // As many loads at once as registers hold: two shapes, for few and for many rows.
    if (num_rows <= 4) {
      sum_row<kFloat32, 4, 3>(terms, num_rows, out, params.row_bytes);
    } else {
      sum_row<kFloat32, 8, 2>(terms, num_rows, out, params.row_bytes);
    }
    __syncwarp();
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH
