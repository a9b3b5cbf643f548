#ifndef FERRY_CUDA_INTRANODE_ENTRIES_CUH
#define FERRY_CUDA_INTRANODE_ENTRIES_CUH

/// A warp's view of [T, K] ids (token_lanes.cuh), and what entries of the same token have in common.

#include <cstdint>

#include "cuda/call/token_lanes.cuh"
#include "cuda/intranode/route_params.hpp"
#include "cuda/placement/pick.cuh"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

struct Entry {
  std::int64_t token = 0;
  int topk = 0;
  bool exists = false;    ///< a lane beyond T or K has no entry
  bool bad = false;       ///< the id names no expert
  bool homeless = false;  ///< the id names an expert without a home
  int expert = -1;        ///< -1: no expert
  int owner = -1;
  unsigned same_rank = 0;    ///< lanes of this token whose expert has the same owner
  unsigned same_expert = 0;  ///< lanes of this token with the same expert
  bool first_of_rank = false;
  bool first_of_expert = false;
};

__device__ inline std::int64_t load_id(const RouteParams& params, std::int64_t at) {
  return params.wide_ids ? static_cast<const std::int64_t*>(params.topk_idx)[at]
                         : static_cast<const std::int32_t*>(params.topk_idx)[at];
}

/// Entry of [T, K] that a lane loads when its warp is at a token.
struct LoadedId {
  std::int64_t token = 0;
  int topk = 0;
  bool exists = false;
  std::int64_t id = -1;
};

__device__ inline LoadedId load_lane_id(const RouteParams& params, std::int64_t first_token, std::int64_t end_token) {
  const TokenLanes lanes(params.num_topk);
  LoadedId loaded;
  loaded.token = first_token + lanes.token_of(lane_idx());
  loaded.topk = lanes.topk_of(lane_idx());
  loaded.exists = loaded.topk < params.num_topk && loaded.token < end_token;
  if (loaded.exists) loaded.id = load_id(params, loaded.token * params.num_topk + loaded.topk);
  return loaded;
}

/// Returns the entry of this lane, by the tables of `placement`. All lanes call it.
__device__ inline Entry entry_of(const RouteParams& params, const PlacementTables& placement, const LoadedId& loaded) {
  Entry entry;
  entry.token = loaded.token;
  entry.topk = loaded.topk;
  entry.exists = loaded.exists;
  if (entry.exists) {
    entry.expert = pick_expert(placement, params.num_experts, loaded.id, entry.token, params.ranks.rank);
    if (entry.expert < 0 && loaded.id != -1) {
      entry.homeless = is_homeless(placement, params.num_experts, loaded.id);
      entry.bad = !entry.homeless;
    }
    if (entry.expert >= 0) entry.owner = placement.owner[entry.expert];
  }
  const TokenLanes lanes(params.num_topk);
  entry.same_rank = lanes_alike(lanes, entry.expert >= 0, entry.owner);
  entry.same_expert = lanes_alike(lanes, entry.expert >= 0, entry.expert);
  entry.first_of_rank = entry.expert >= 0 && __ffs(static_cast<int>(entry.same_rank)) - 1 == lane_idx();
  entry.first_of_expert = entry.expert >= 0 && __ffs(static_cast<int>(entry.same_expert)) - 1 == lane_idx();
  return entry;
}

/// Returns the entry of this lane when the warp is at `first_token`. All lanes call it.
__device__ inline Entry load_entry(const RouteParams& params, std::int64_t first_token, std::int64_t end_token) {
  return entry_of(params, params.placement, load_lane_id(params, first_token, end_token));
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_ENTRIES_CUH
