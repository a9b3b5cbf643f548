#ifndef FERRY_CUDA_CALL_TOKEN_LANES_CUH
#define FERRY_CUDA_CALL_TOKEN_LANES_CUH

/// A warp that looks at several tokens at a time, one entry of [T, K] per lane, tokens in ascending order.

#include <cstdint>

#include "cuda/sync/flags.cuh"

namespace ferry::cuda::device {

/// Lanes that a token takes: K rounded up to a power of two.
struct TokenLanes {
  int shift = 0;  ///< the number of lanes is 1 << shift

  __device__ explicit TokenLanes(int num_topk) {
    if (num_topk > 1) shift = kWarpLanes - __clz(num_topk - 1);
  }
  __device__ int width() const { return 1 << shift; }
  __device__ int tokens_per_warp() const { return kWarpLanes >> shift; }
  __device__ int token_of(int lane) const { return lane >> shift; }
  __device__ int topk_of(int lane) const { return lane & (width() - 1); }
  /// Lanes of the token that a lane belongs to.
  __device__ unsigned of_token(int lane) const {
    return kAllLanes >> (kWarpLanes - width()) << (lane & ~(width() - 1));
  }
};

/// Lanes of this lane's token that have the same `key` (below 65536); without a key, this lane only. All lanes call it.
__device__ inline unsigned lanes_alike(const TokenLanes& lanes, bool has_key, int key) {
  const unsigned none = 0x80000000U | static_cast<unsigned>(lane_idx());
  const auto token = static_cast<unsigned>(lanes.token_of(lane_idx())) << 16;
  return __match_any_sync(kAllLanes, has_key ? token | static_cast<unsigned>(key) : none);
}

/// Position of each first lane in its run, in lane order; advances the run. All lanes call it.
__device__ inline std::int32_t take_position(std::int32_t* next, int run, bool first) {
  const unsigned none = 0x80000000U | static_cast<unsigned>(lane_idx());
  const unsigned same = __match_any_sync(kAllLanes, first ? static_cast<unsigned>(run) : none);
  const unsigned below = same & ((1U << lane_idx()) - 1U);
  std::int32_t position = 0;
  if (first) position = next[run] + __popc(below);
  __syncwarp();
  if (first && below == 0) next[run] += __popc(same);
  __syncwarp();
  return position;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_CALL_TOKEN_LANES_CUH
