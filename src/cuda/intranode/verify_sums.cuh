#ifndef FERRY_CUDA_INTRANODE_VERIFY_SUMS_CUH
#define FERRY_CUDA_INTRANODE_VERIFY_SUMS_CUH

/// Checksums of rows, computed by a warp. Words of a row, in order: its payload, its scales (a word for each), then a
/// word for each of its ids and for each of its weights.

#include "cuda/call/tensors.hpp"
#include "cuda/sync/flags.cuh"
#include "numeric/row_checksum.hpp"

namespace ferry::cuda::device {

using numeric::mix_at;

/// Sum over all lanes, on each.
__device__ inline std::uint64_t add_lanes(std::uint64_t sum) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, static_cast<unsigned long long>(sum), distance);
  }
  return sum;
}

/// This lane's part of the payload's sum.
__device__ inline std::uint64_t sum_payload(const std::byte* row, std::int64_t row_bytes) {
  constexpr int kUnroll = 4;
  const auto* vectors = reinterpret_cast<const uint4*>(row);
  const std::int64_t count = row_bytes / static_cast<std::int64_t>(sizeof(uint4));
  std::uint64_t sum = 0;
#pragma unroll 1
  for (std::int64_t first = lane_idx(); first < count; first += kUnroll * kWarpLanes) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) values[i] = vectors[first + i * kWarpLanes];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes >= count) continue;
      const auto word = static_cast<std::uint64_t>(2 * (first + i * kWarpLanes));
      sum += mix_at(static_cast<std::uint64_t>(values[i].y) << 32 | values[i].x, word);
      sum += mix_at(static_cast<std::uint64_t>(values[i].w) << 32 | values[i].z, word + 1);
    }
  }
  return sum;
}

/// This lane's part of the sum of a row's scales, whose first word is `position`.
__device__ inline std::uint64_t sum_scales(const ScaleTable& scales, std::int64_t row, std::int64_t position) {
  if (scales.num_scales == 0) return 0;
  const std::byte* from = scales.row(row);
  std::uint64_t sum = 0;
  for (int column = lane_idx(); column < scales.num_scales; column += kWarpLanes) {
    const std::byte* scale = from + column * scales.column_stride * scales.element_bytes;
    const std::uint64_t word =
        scales.element_bytes == 4 ? *reinterpret_cast<const std::uint32_t*>(scale) : static_cast<std::uint64_t>(*scale);
    sum += mix_at(word, static_cast<std::uint64_t>(position + column));
  }
  return sum;
}

/// Position of the first word after payload and scales.
__device__ inline std::int64_t words_before_tables(std::int64_t row_bytes, const ScaleTable& scales) {
  return row_bytes / static_cast<std::int64_t>(sizeof(std::uint64_t)) + scales.num_scales;
}

/// Part of an id, -1 for none, and of a weight that are the `topk`-th of `num_topk` in their row.
__device__ inline std::uint64_t sum_id(std::int64_t id, std::int64_t position, int topk) {
  return mix_at(static_cast<std::uint64_t>(id), static_cast<std::uint64_t>(position + topk));
}
__device__ inline std::uint64_t sum_weight(float weight, std::int64_t position, int topk, int num_topk) {
  return mix_at(__float_as_uint(weight), static_cast<std::uint64_t>(position + num_topk + topk));
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_VERIFY_SUMS_CUH
