#ifndef FERRY_CUDA_INTERNODE_NODE_ROUTE_COUNT_CUH
#define FERRY_CUDA_INTERNODE_NODE_ROUTE_COUNT_CUH

/// Reads the ids of all tokens and counts the tokens of each destination. Each count is made by one warp.

#include <cstdint>

#include "cuda/internode/node_route_params.hpp"
#include "cuda/sync/rank_sync.cuh"

namespace ferry::cuda::device {

/// Ids of one rank, as every rank received them.
struct RankIds {
  const IdsHeader* header;
  const std::int32_t* ids;  ///< [max_tokens, K]

  __device__ RankIds(const NodeRouteParams& params, int rank)
      : header(reinterpret_cast<const IdsHeader*>(params.all + rank * params.blocks.block_bytes())),
        ids(reinterpret_cast<const std::int32_t*>(header + 1)) {}

  /// Number of the rank's tokens, clamped to this rank's memory because it comes from another rank.
  __device__ std::int64_t num_tokens(const NodeRouteParams& params) const {
    const std::int64_t num = header->num_tokens;
    return num < 0 ? 0 : num < params.blocks.max_tokens ? num : params.blocks.max_tokens;
  }
  /// Expert of a choice; -1: none.
  __device__ int expert(const NodeRouteParams& params, std::int64_t token, int topk) const {
    const std::int32_t id = ids[token * params.num_topk + topk];
    return id >= 0 && id < params.num_experts ? id : -1;
  }
  /// Calls `visit(topk, expert)` for those of a token's choices that name an expert. One load takes four choices if
  /// possible: each lane has a token of its own, and a load's cost is the number of lines that all lanes touch.
  template <typename Visit>
  __device__ void visit_experts(const NodeRouteParams& params, std::int64_t token, Visit visit) const {
    const std::int32_t* const choices = ids + token * params.num_topk;
    const auto visit_one = [&params, &visit](int topk, std::int32_t id) {
      if (id >= 0 && id < params.num_experts) visit(topk, id);
    };
    if (params.num_topk % 4 != 0) {
      for (int topk = 0; topk < params.num_topk; ++topk) visit_one(topk, choices[topk]);
      return;
    }
    for (int topk = 0; topk < params.num_topk; topk += 4) {
      const int4 four = *reinterpret_cast<const int4*>(choices + topk);
      visit_one(topk, four.x);
      visit_one(topk + 1, four.y);
      visit_one(topk + 2, four.z);
      visit_one(topk + 3, four.w);
    }
  }
};

__device__ inline int run_of(const NodeRouteParams& params, int expert) {
  return params.by_token() ? params.placement.owner[expert] : expert;
}

/// Calls `take(token, position)` for the tokens for which `wants(token)` is true, in order; returns their number. One
/// warp calls it.
template <typename Wants, typename Take>
__device__ inline int number_tokens(std::int64_t num_tokens, Wants wants, Take take) {
  int num = 0;
  for (std::int64_t first = 0; first < num_tokens; first += kWarpLanes) {
    const std::int64_t token = first + lane_idx();
    const bool wanted = token < num_tokens && wants(token);
    const unsigned all = __ballot_sync(kAllLanes, static_cast<int>(wanted));
    if (wanted) take(token, num + __popc(all & ((1U << lane_idx()) - 1U)));
    num += __popc(all);
  }
  return num;
}

/// Whether `wanted(expert)` is true for any of a token's experts.
template <typename Wanted>
__device__ inline bool has_expert(const NodeRouteParams& params, const RankIds& source, std::int64_t token,
                                  Wanted wanted) {
  bool has = false;
  source.visit_experts(params, token, [&has, &wanted](int, int expert) { has = has || wanted(expert); });
  return has;
}

__device__ inline void count_run(const NodeRouteParams& params, int run, int rank) {
  const RankIds source(params, rank);
  const auto in_run = [&params, run](int expert) { return run_of(params, expert) == run; };
  const int count = number_tokens(
      source.num_tokens(params), [&](std::int64_t token) { return has_expert(params, source, token, in_run); },
      [&](std::int64_t token, int position) {
        std::int32_t* positions =
            params.scratch.positions + (rank * params.blocks.max_tokens + token) * params.num_topk;
        source.visit_experts(params, token, [&in_run, positions, position](int topk, int expert) {
          if (in_run(expert)) positions[topk] = position;
        });
      });
  if (lane_idx() == 0) params.scratch.run_counts[static_cast<std::int64_t>(run) * params.num_ranks + rank] = count;
}

/// Counts the tokens of an expert, for layout kTokens, in which the rows of experts are only counted.
__device__ inline int count_tokens_of(const NodeRouteParams& params, int wanted, int rank) {
  const RankIds source(params, rank);
  return number_tokens(
      source.num_tokens(params),
      [&](std::int64_t token) {
        return has_expert(params, source, token, [wanted](int expert) { return expert == wanted; });
      },
      [](std::int64_t, int) {});
}

__device__ inline void count_expert(const NodeRouteParams& params, int local, int rank) {
  const int wanted = params.placement.by_owner[params.placement.first_of_rank[params.group_rank] + local];
  const int count = count_tokens_of(params, wanted, rank);
  if (lane_idx() == 0) params.scratch.expert_counts[local * params.num_ranks + rank] = count;
}

__device__ inline void count_own(const NodeRouteParams& params, int expert) {
  const int count = count_tokens_of(params, expert, params.group_rank);
  if (lane_idx() == 0) params.scratch.own_counts[expert] = count;
}

__device__ inline bool goes_to(const NodeRouteParams& params, const RankIds& source, std::int64_t token, int node) {
  return has_expert(params, source, token, [&params, node](int expert) {
    return params.placement.owner[expert] / params.ranks_per_node == node;
  });
}

/// Numbers the items that a rank sends to this node.
__device__ inline void number_items_in(const NodeRouteParams& params, int rank) {
  const RankIds source(params, rank);
  std::int32_t* const items = params.scratch.node_items + rank * params.blocks.max_tokens;
  const std::int64_t num_tokens = source.num_tokens(params);
  for (std::int64_t token = lane_idx(); token < num_tokens; token += kWarpLanes) items[token] = -1;
  __syncwarp();
  const int num = number_tokens(
      num_tokens, [&](std::int64_t token) { return goes_to(params, source, token, params.node()); },
      [items](std::int64_t token, int position) { items[token] = position; });
  if (lane_idx() == 0) params.scratch.items_in[rank] = num;
}

/// First of the items that combine returns from another node. Items that this rank sends to its own node are not
/// returned.
__device__ inline std::int32_t first_back(const NodeRouteParams& params, int node) {
  return static_cast<std::int32_t>((node < params.node() ? node : node - 1) * params.num_tokens);
}

/// Numbers the items that this rank sends to a node.
__device__ inline void number_items_out(const NodeRouteParams& params, int node) {
  const RankIds source(params, params.group_rank);
  const std::int64_t first = node == params.node() ? node * params.blocks.max_tokens : first_back(params, node);
  const int num = number_tokens(
      source.num_tokens(params), [&](std::int64_t token) { return goes_to(params, source, token, node); },
      [&](std::int64_t token, int position) {
        params.tables.out_tokens[node * params.num_tokens + position] = static_cast<std::int32_t>(token);
        params.tables.item_of_token[node * params.num_tokens + token] = static_cast<std::int32_t>(first + position);
      });
  if (lane_idx() == 0) params.scratch.items_out[node] = num;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_NODE_ROUTE_COUNT_CUH
