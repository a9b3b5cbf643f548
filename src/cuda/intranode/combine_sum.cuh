#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH

/// Summing by loads, for devices without the bulk copy engine: a warp takes every n-th token and adds its rows, 16
/// bytes per lane, loading all rows of a step before it adds the first.

#include "cuda/intranode/combine_fp8_rows.cuh"
#include "cuda/intranode/combine_plain_rows.cuh"
#include "cuda/intranode/combine_weights.cuh"

namespace ferry::cuda::device {

/// Sums tokens first, first + step, … below the number of tokens. One warp calls it.
template <typename Rows>
__device__ inline void sum_by_threads(const CombineParams& params, TermFinder& finder, const ReturnedWeights& weights,
                                      Terms& terms, int first, int step) {
  for (int token = first; token < params.num_tokens; token += step) {
    const TokenEntry entry = finder.load_entry(token);
    const int num_rows = finder.find(token, entry, terms);
    if (num_rows < 0) return;
    // Fetched before the rows, not beside them: rows need all registers.
    ReturnedWeights of_token = weights;
    of_token.fetch(token, entry.destination);
    wait_fetches();
    of_token.sum();
    std::byte* out = params.out_x + static_cast<std::int64_t>(token) * params.out_stride;
    // As many loads at a time as registers hold, in two shapes: few rows and many rows.
    if constexpr (Rows::kQuantized) {
      const auto num_channels = static_cast<int>(params.row_bytes / (Rows::kPieceGranule / kQuantBlockSize));
      sum_wire_row<Rows::kIsFloat32>(terms, num_rows, params.wire_bias, {token, out, num_channels});
    } else if (num_rows <= 4) {
      sum_row<Rows::kIsFloat32, 4, 3>(terms, num_rows, out, params.row_bytes);
    } else {
      sum_row<Rows::kIsFloat32, 8, 2>(terms, num_rows, out, params.row_bytes);
    }
    __syncwarp();
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH
