#ifndef FERRY_CUDA_INTRANODE_DISPATCH_STAGES_CUH
#define FERRY_CUDA_INTRANODE_DISPATCH_STAGES_CUH

/// Parts that sending and receiving blocks share: block shape, and a warp's stages of shared memory.

#include "cuda/copy/bulk_copy.cuh"
#include "cuda/intranode/dispatch_params.hpp"
#include "cuda/sync/chunks.cuh"

namespace ferry::cuda::device {

/// Warps per block, each with its own stages. With long rows, two warps on each of eight multiprocessors fill the links
/// of an H200; with short rows many warps hide the fixed cost of a token, which dominates.
inline constexpr int kDispatchWarps = 16;
inline constexpr int kDispatchThreads = kDispatchWarps * kWarpLanes;
/// One stage is being stored, one is landing, one waits.
inline constexpr int kStages = 3;
/// Longest piece of a row in one stage; longer rows are divided. Sizes from 512 B to 14 KiB copy equally fast.
inline constexpr int kPieceBytes = 3584;
/// Longest record that is loaded into a stage after the piece; longer records are read from memory.
inline constexpr int kStagedRecordBytes = 512;
inline constexpr int kStageBytes = kPieceBytes + kStagedRecordBytes;
static_assert(kPieceBytes % kLandingBytes == 0 && kStageBytes % kLandingBytes == 0);

/// Scale words that a lane holds; rows of up to 64 words are loaded ahead.
inline constexpr int kHeldScaleWords = 2;

struct WarpStages {
  std::byte* data;             ///< [kStages, kStageBytes]
  std::uint64_t* barriers;     ///< [kStages]
  std::uint32_t parities = 0;  ///< bit s: parity of the next completed load of stage s

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

/// Number of pieces that a row is divided into.
__device__ inline int num_pieces(std::int64_t row_bytes) {
  return static_cast<int>((row_bytes + kPieceBytes - 1) / kPieceBytes);
}
__device__ inline std::uint32_t piece_bytes(std::int64_t row_bytes, int piece) {
  const std::int64_t left = row_bytes - static_cast<std::int64_t>(piece) * kPieceBytes;
  return static_cast<std::uint32_t>(left < kPieceBytes ? left : kPieceBytes);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_DISPATCH_STAGES_CUH
