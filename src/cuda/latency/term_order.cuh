#ifndef FERRY_CUDA_LATENCY_TERM_ORDER_CUH
#define FERRY_CUDA_LATENCY_TERM_ORDER_CUH

/// Puts what the lanes of a warp have, an entry of one token each, into the order in which it is added.

#include <cstddef>
#include <cstdint>

#include "cuda/numeric/row_sum.cuh"

namespace ferry::cuda::device {

/// Of an entry that has no row.
inline constexpr std::uint64_t kNoTerm = UINT64_MAX;

/// An entry's term: the row `row`, counted with `weight`. Entries of equal keys have the same row.
struct Term {
  std::uint64_t key = kNoTerm;
  const std::byte* row = nullptr;  ///< read from the first lane of a key only
  float weight = 1.0F;
};

/// Fills `terms` in ascending order of (key, lane), each row once; with `weighted` it counts with the weights of all
/// its entries in turn, else once with 1. Only the first `num_entries` lanes have one. Returns the number of rows. All
/// lanes of a warp.
__device__ inline int order_terms(const Term& term, int num_entries, bool weighted, Terms& terms) {
  constexpr unsigned kLanes = 0xFFFFFFFFU;
  const int lane = lane_idx();
  int position = 0;
  bool first = true;
#pragma unroll 1
  for (int other = 0; other < num_entries; ++other) {
    const std::uint64_t key = __shfl_sync(kLanes, term.key, other);
    const bool before = other < lane && key == term.key;
    position += static_cast<int>(key < term.key || before);
    first = first && !before;
  }
  const bool counts = term.key != kNoTerm;
  first = first && counts;
  const unsigned first_positions = __reduce_or_sync(kLanes, first ? 1U << position : 0U);
  const int num_entries_left = __popc(__ballot_sync(kLanes, static_cast<int>(counts)));
  const int num_rows = __popc(first_positions);
  if (first) {
    const int row = __popc(first_positions & ((1U << position) - 1U));
    terms.rows[row] = term.row;
    terms.first_weight[row] = static_cast<std::uint8_t>(weighted ? position : row);
    if (!weighted) terms.weights[row] = 1.0F;
  }
  if (weighted && counts) terms.weights[position] = term.weight;
  if (lane == 0) terms.first_weight[num_rows] = static_cast<std::uint8_t>(weighted ? num_entries_left : num_rows);
  __syncwarp();
  return num_rows;
}

/// out[0, bytes) = the sum of the terms. All lanes of a warp, after which `terms` may be filled again. As many loads at
/// once as registers hold.
template <bool kFloat32>
__device__ inline void sum_few_terms(const Terms& terms, int num_rows, std::byte* out, std::int64_t bytes) {
  sum_row<kFloat32, 4, 2>(terms, num_rows, out, bytes);
  __syncwarp();
}

/// The same where there may be many.
template <bool kFloat32>
__device__ inline void sum_terms(const Terms& terms, int num_rows, std::byte* out, std::int64_t bytes) {
  constexpr int kFew = 4;
  if (num_rows <= kFew) {
    sum_few_terms<kFloat32>(terms, num_rows, out, bytes);
    return;
  }
  sum_row<kFloat32, 8, 1>(terms, num_rows, out, bytes);
  __syncwarp();
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_TERM_ORDER_CUH
