/// Rows that hold no token: ids -1, source -1, and zeros if the caller asked for them. One warp per row.

#include "cuda/call/padding.hpp"
#include "cuda/driver/launch.hpp"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kPaddingThreads = 256;
constexpr int kMaxPaddingBlocks = 132;

__device__ void zero_row(const PaddingParams& params, std::int64_t row) {
  auto* x = reinterpret_cast<uint4*>(params.out.x + row * params.out.x_stride);
  const std::int64_t num_vectors = params.row_bytes / static_cast<std::int64_t>(sizeof(uint4));
  for (std::int64_t i = lane_idx(); i < num_vectors; i += kWarpLanes) x[i] = make_uint4(0, 0, 0, 0);
  const ScaleTable& scales = params.out.scales;
  std::byte* scale_row = scales.row(row);
  for (int i = lane_idx(); scales.data != nullptr && i < scales.num_scales; i += kWarpLanes) {
    if (scales.element_bytes == 4) {
      *reinterpret_cast<std::uint32_t*>(scale_row + i * scales.column_stride * 4) = 0;
    } else {
      scale_row[i * scales.column_stride] = std::byte{0};
    }
  }
  for (int i = lane_idx(); params.out.weights != nullptr && i < params.weights_per_row; i += kWarpLanes) {
    params.out.weights[row * params.weights_per_row + i] = 0.0F;
  }
}

/// Whether the call before, which may have been refused, has moved rows.
__device__ bool has_moved(const PaddingParams& params) {
  const RankParams& ranks = params.ranks;
  if (is_broken(ranks) || params.summary->valid == 0) return false;
  return (ranks.control.local->outcome & 3U) == static_cast<std::uint64_t>(Outcome::kGo);
}

__device__ void clear_ids(const PaddingParams& params, std::int64_t row) {
  for (int i = lane_idx(); params.out.ids != nullptr && i < params.num_topk; i += kWarpLanes) {
    if (params.out.wide_ids) {
      static_cast<std::int64_t*>(params.out.ids)[row * params.num_topk + i] = -1;
    } else {
      static_cast<std::int32_t*>(params.out.ids)[row * params.num_topk + i] = -1;
    }
  }
}

__global__ void __launch_bounds__(kPaddingThreads) padding_kernel(const __grid_constant__ PaddingParams params) {
  const bool moved = has_moved(params);
  if (!moved && !params.clears_refused) return;
  const int num_warps = static_cast<int>(gridDim.x) * (kPaddingThreads / kWarpLanes);
  const int warp = static_cast<int>(blockIdx.x) * (kPaddingThreads / kWarpLanes) + warp_idx();
  for (std::int64_t row = warp; row < params.num_rows; row += num_warps) {
    const int2 source = moved ? reinterpret_cast<const int2*>(params.source)[row] : make_int2(-1, -1);
    if (params.out_source != nullptr && lane_idx() < 2) {  // the caller's table is aligned to 4 bytes only
      params.out_source[2 * row + lane_idx()] = lane_idx() == 0 ? source.x : source.y;
    }
    if (source.x >= 0) continue;
    clear_ids(params, row);
    if (moved && params.zero) zero_row(params, row);
  }
}

}  // namespace

cudaError_t launch_padding(const PaddingParams& params, cudaStream_t stream) {
  constexpr std::int64_t kWarps = kPaddingThreads / kWarpLanes;
  const std::int64_t wanted = (params.num_rows + kWarps - 1) / kWarps;
  const int most = params.max_blocks < kMaxPaddingBlocks ? params.max_blocks : kMaxPaddingBlocks;
  const auto num_blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  if (num_blocks == 0) return cudaSuccess;
  return launch_kernel(padding_kernel, {num_blocks, kPaddingThreads, 0}, params, stream);
}

cudaError_t load_padding_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(padding_kernel));
}

}  // namespace ferry::cuda
