#ifndef FERRY_CUDA_LATENCY_FAR_POST_CUH
#define FERRY_CUDA_LATENCY_FAR_POST_CUH

/// Posts of messages to ranks of other nodes (cuda/far/params.hpp): what the thread that drives the network reads.

#include <cstdint>

#include "cuda/far/params.hpp"
#include "cuda/latency/params.hpp"
#include "cuda/latency/window.hpp"
#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Post of a message (kFarMessages) to a far rank.
__device__ inline FarPost& post_of(const FarParams& far, int message, int rank) {
  return far.posts[message * far.layout.num_ranks + rank];
}

/// Warp of each block of a far kernel that posts, or reports what its block has stored. Not the first, which meanwhile
/// tells ranks of this node what has been sent.
inline constexpr int kPostingWarp = 1;
/// Parts of a message, to be put.
struct FarParts {
  FarPart front;
  FarPart rows;  ///< rows that do not follow the front
  int set = 0;
  bool announced = false;  ///< FrontShape
  int num_blocks = 0;      ///< FrontShape
};

/// Writes the post of message `message` (kFarMessages) to a far rank, without its number. One thread.
__device__ inline void write_post(const LatencyParams& call, const FarParams& far, int message, int rank,
                                  const FarParts& parts) {
  FarPost& post = post_of(far, message, rank);
  post.record_number = call.record_number;
  post.front = parts.front.from;
  post.front_to = static_cast<std::uint64_t>(parts.front.to);
  post.front_shape =
      FrontShape{parts.front.bytes, parts.set, parts.announced || !far.layout.in_gpu, parts.num_blocks}.packed();
  post.rows = parts.rows.from;
  post.rows_to = static_cast<std::uint64_t>(parts.rows.to);
  post.rows_bytes = static_cast<std::uint64_t>(parts.rows.bytes);
}

/// Posts a message of number `number` to a far rank: the driver then reads its post, which this thread has seen. One
/// thread.
__device__ inline void post_number(const FarParams& far, int message, int rank, std::uint64_t number) {
  fence_system();
  store_relaxed_system(&post_of(far, message, rank).number, number);
}

/// Reports to the driver that this block has stored what it sends to far ranks in call `number`: done word `idx`. The
/// posting warp, behind a barrier of the block.
__device__ inline void report_block(const FarParams& far, LatencyKind kind, int idx, std::uint64_t number) {
  if (lane_idx() != 0) return;
  fence_system();
  store_relaxed_system(far.done + static_cast<int>(kind) * kMaxCallBlocks + idx, number);
}

/// Both.
__device__ inline void post_message(const LatencyParams& call, const FarParams& far, int message, int rank,
                                    std::uint64_t number, const FarParts& parts) {
  write_post(call, far, message, rank, parts);
  post_number(far, message, rank, number);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_FAR_POST_CUH
