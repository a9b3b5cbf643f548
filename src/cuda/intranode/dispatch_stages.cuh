#ifndef FERRY_CUDA_INTRANODE_DISPATCH_STAGES_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_STAGES_CUH

/// What sending and receiving blocks share: their shape, and a warp's stages of shared memory.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/sync/chunks.cuh"

namespace ferry::cuda::device {

/// Warps per block, each with its own stages. Two warps on each of eight multiprocessors fill the links of an H200 with
/// long rows; many hide what a token costs beside its bytes, which is what short rows wait for.
inline constexpr int kDispatchWarps = 16;
inline constexpr int kDispatchThreads = kDispatchWarps * kWarpLanes;
/// One being stored, one landing, one waiting.
inline constexpr int kStages = 3;
/// Longest piece of a row in one stage; longer rows go in pieces. Sizes from 512 B to 14 KiB copy equally fast.
inline constexpr int kPieceBytes = 3584;
/// Longest record that lands in a stage beside the piece; longer ones are read where they are.
inline constexpr int kStagedRecordBytes = 512;
inline constexpr int kStageBytes = kPieceBytes + kStagedRecordBytes;
static_assert(kPieceBytes % kLandingBytes == 0 && kStageBytes % kLandingBytes == 0);

struct WarpStages {
  std::byte* data;             ///< [kStages, kStageBytes]
  std::uint64_t* barriers;     ///< [kStages]
  std::uint32_t parities = 0;  ///< bit s: parity that the next completed load of stage s has

  __device__ std::byte* stage(int idx) const { return data + idx * kStageBytes; }
  __device__ std::byte* record(int idx) const { return stage(idx) + kPieceBytes; }
  __device__ void wait_loaded(int idx) {
    wait_barrier(barriers + idx, parities >> idx & 1U);
    parities ^= 1U << idx;
  }
};

inline constexpr std::size_t kStagesBytes = static_cast<std::size_t>(kDispatchWarps) * kStages * kStageBytes;
inline constexpr std::size_t kBarriersBytes = kDispatchWarps * kStages * sizeof(std::uint64_t);

/// This warp's stages in the block's shared memory. All threads of the block call it; ends with a block barrier.
__device__ inline WarpStages make_stages(std::byte* shared) {
  auto* barriers = reinterpret_cast<std::uint64_t*>(shared + kStagesBytes);
  WarpStages stages{shared + static_cast<std::size_t>(warp_idx()) * kStages * kStageBytes,
                    barriers + warp_idx() * kStages};
  if (lane_idx() == 0) {
    for (int i = 0; i < kStages; ++i) init_barrier(stages.barriers + i);
    publish_barriers();
  }
  __syncthreads();
  return stages;
}

/// Pieces that a row goes in.
__device__ inline int num_pieces(std::int64_t row_bytes) {
  return static_cast<int>((row_bytes + kPieceBytes - 1) / kPieceBytes);
}
__device__ inline std::uint32_t piece_bytes(std::int64_t row_bytes, int piece) {
  const std::int64_t left = row_bytes - static_cast<std::int64_t>(piece) * kPieceBytes;
  return static_cast<std::uint32_t>(left < kPieceBytes ? left : kPieceBytes);
}

/// Copies `bytes` (a multiple of 16) with one warp's loads and stores.
__device__ inline void copy_by_warp(std::byte* to, const std::byte* from, std::int64_t bytes) {
  constexpr int kUnroll = 4;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(uint4));
  for (std::int64_t first = lane_idx(); first < count; first += kUnroll * kWarpLanes) {
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) values[i] = source[first + i * kWarpLanes];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kWarpLanes < count) target[first + i * kWarpLanes] = values[i];
    }
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_STAGES_CUH
