#ifndef FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH
#define FERRY_CUDA_INTRANODE_COMBINE_SUM_CUH

/// Summing by loads: a warp takes every n-th token and adds its rows up 16 bytes a lane, all rows of a step loaded
/// before the first is added. For devices without the bulk copy engine.

#include "cuda/intranode/combine_terms.cuh"

namespace ferry::cuda::device {

/// A peer's memory: not kept in the first-level cache, where it would outlive the call.
__device__ inline uint4 load_row(const std::byte* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

/// Adds rows [first, first + kRows) of `terms`, those that exist, to kSteps vectors, 512 bytes apart.
template <bool kFloat32, int kRows, int kSteps>
__device__ inline void add_rows(const Terms& terms, int first, int num_rows, std::int64_t offset,
                                std::int64_t row_bytes, Vector<kFloat32> (&sums)[kSteps]) {
  constexpr std::int64_t kStepBytes = kWarpLanes * sizeof(uint4);
  uint4 raw[kRows][kSteps];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = offset + step * kStepBytes;
      if (first + row < num_rows && at < row_bytes) raw[row][step] = load_row(terms.rows[first + row] + at);
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (first + row >= num_rows) break;
    for (int i = terms.first_weight[first + row]; i < terms.first_weight[first + row + 1]; ++i) {
      const float weight = terms.weights[i];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (offset + step * kStepBytes < row_bytes) sums[step].add(raw[row][step], weight);
      }
    }
  }
}

/// out = the sum of all terms, one warp.
template <bool kFloat32, int kRows, int kSteps>
__device__ inline void sum_row(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  constexpr std::int64_t kStepBytes = kWarpLanes * sizeof(uint4);
  for (std::int64_t offset = lane_idx() * static_cast<std::int64_t>(sizeof(uint4)); offset < row_bytes;
       offset += kSteps * kStepBytes) {
    Vector<kFloat32> sums[kSteps];
#pragma unroll
    for (Vector<kFloat32>& sum : sums) sum.clear();
    for (int first = 0; first < num_rows; first += kRows) {
      add_rows<kFloat32, kRows, kSteps>(terms, first, num_rows, offset, row_bytes, sums);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::int64_t at = offset + step * kStepBytes;
      if (at < row_bytes) *reinterpret_cast<uint4*>(out + at) = sums[step].round();
    }
  }
}

/// Tokens first, first + step, … below the number of tokens; one warp.
template <bool kFloat32>
__device__ inline void sum_by_threads(const CombineParams& params, const TermFinder& finder, Terms& terms,
                                      std::int64_t first, std::int64_t step) {
  for (std::int64_t token = first; token < params.num_tokens; token += step) {
    const Destination destination = finder.load_destination(token);
    const int num_rows = finder.find(token, destination, terms);
    if (num_rows < 0) return;
    finder.return_weights(token, destination);
    std::byte* out = params.out_x + token * params.out_stride;
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
