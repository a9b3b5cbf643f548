#ifndef FERRY_CUDA_KERNELS_COMBINE_STAGE_CUH
#define FERRY_CUDA_KERNELS_COMBINE_STAGE_CUH

/// Staging warps: copy this rank's rows to memory that peers reach, each source's rows in the order in which it will
/// want them, all sources side by side, and tell them how far it is.

#include "cuda/kernels/combine/sum.cuh"

namespace ferry::cuda::device {

__device__ inline void stage_row(const CombineParams& params, std::int64_t row) {
  constexpr int kUnroll = 8;
  const auto* from = reinterpret_cast<const uint4*>(params.x + row * params.x_stride);
  auto* to = reinterpret_cast<uint4*>(params.staging + row * params.row_bytes);
  const auto count = static_cast<int>(params.row_bytes / static_cast<std::int64_t>(sizeof(uint4)));
  for (int first = lane_idx(); first < count; first += kUnroll * kWarpLanes) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) values[i] = from[first + i * kWarpLanes];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) to[first + i * kWarpLanes] = values[i];
    }
  }
}

__device__ inline void stage_rows(const CombineParams& params, std::uint64_t epoch, Outcome outcome, int warp,
                                  int num_warps) {
  const int num_ranks = params.crew.num_ranks;
  const bool go = outcome == Outcome::kGo;
  std::int32_t most_rows = 0;
  for (int source = 0; go && source < num_ranks; ++source) {
    const std::int32_t count = params.source_base[source + 1] - params.source_base[source];
    if (source != params.crew.rank && count > most_rows) most_rows = count;
  }
  const int wanted = (most_rows + params.chunk_rows - 1) / params.chunk_rows;
  const int num_chunks = !go || !params.one_row_per_token || wanted < 1 ? 1 : wanted;
  const auto rows_after = [&params, num_chunks, go](int chunk, int source) -> std::int64_t {
    if (!go) return 0;
    const std::int64_t count = params.source_base[source + 1] - params.source_base[source];
    const std::int64_t staged = static_cast<std::int64_t>(chunk + 1) * params.chunk_rows;
    return chunk + 1 == num_chunks || count < staged ? count : staged;
  };
  ChunkReporter reporter(params.crew, {num_warps, num_chunks}, epoch, rows_after, false);
  if (go && params.one_row_per_token) {
    const std::int64_t num_items = static_cast<std::int64_t>(most_rows) * num_ranks;
    for (std::int64_t item = warp; item < num_items; item += num_warps) {
      const int source = static_cast<int>(item % num_ranks);
      const auto idx = static_cast<std::int32_t>(item / num_ranks);
      reporter.report_before(idx / params.chunk_rows);
      const std::int32_t row = params.source_base[source] + idx;
      if (source != params.crew.rank && row < params.source_base[source + 1]) stage_row(params, row);
    }
  } else if (go) {
    // Rows are grouped by expert: a source's first token may be anywhere, so everything is staged before it is told.
    for (std::int64_t row = warp; row < params.summary->num_used_rows; row += num_warps) {
      const std::int32_t source = params.source[2 * row];
      if (source >= 0 && source != params.crew.rank) stage_row(params, row);
    }
  }
  reporter.report_before(num_chunks);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_KERNELS_COMBINE_STAGE_CUH
