#ifndef FERRY_CUDA_INTERNODE_TOKEN_SUM_CUH
#define FERRY_CUDA_INTERNODE_TOKEN_SUM_CUH

/// Sums over the nodes for each of this rank's tokens, by blocks of the exchange that brings the sums of other nodes,
/// as these come in: both ends have a node's sums in the order of tokens. One warp per token.

#include "cuda/internode/arrivals.cuh"
#include "cuda/internode/node_sum.cuh"

namespace ferry::cuda::device {

/// Position of a node's sum for the token; -1 if the node has no rows of the token.
__device__ inline std::int32_t item_of(const TokenSumParams& params, int node, std::int64_t token) {
  return params.item_of_token[node * params.num_tokens + token];
}

__device__ inline const float* weights_of(const TokenSumParams& params, int node, std::int64_t token) {
  const std::int64_t item = item_of(params, node, token);
  return (node == params.node ? params.own_weights : params.returned_weights) + item * params.num_topk;
}

__device__ inline void sum_token_weights(const TokenSumParams& params, std::int64_t token) {
  if (lane_idx() >= params.num_topk) return;
  const std::int64_t entry = token * params.num_topk + lane_idx();
  float sum = 0.0F;
  if (params.one_row_per_token) {
    for (int node = 0; node < params.num_nodes; ++node) {
      if (item_of(params, node, token) >= 0) sum = __fadd_rn(sum, weights_of(params, node, token)[lane_idx()]);
    }
  } else if (params.ids[entry] >= 0) {
    sum = weights_of(params, params.owner[params.ids[entry]] / params.ranks_per_node, token)[lane_idx()];
  }
  params.out_weights[entry] = sum;
}

/// Collects biases, then nodes in ascending order, one node per lane. Returns the number of rows.
__device__ inline int collect_nodes(const TokenSumParams& params, std::int64_t token, Terms& terms) {
  int num_rows = 0;
  for (const BiasRows& bias : params.bias) {
    if (bias.data == nullptr) continue;
    if (lane_idx() == 0) terms.rows[num_rows] = bias.data + token * bias.stride;
    ++num_rows;
  }
  const int node = lane_idx();
  const std::int64_t item = node < params.num_nodes ? item_of(params, node, token) : -1;
  const unsigned present = __ballot_sync(kAllLanes, item >= 0);
  if (item >= 0) {
    const int idx = num_rows + __popc(present & ((1U << lane_idx()) - 1U));
    terms.rows[idx] =
        node == params.node ? params.own + item * params.own_stride : params.returned + item * params.row_bytes;
  }
  num_rows += __popc(present);
  for (int row = lane_idx(); row <= num_rows; row += kWarpLanes) {
    terms.first_weight[row] = static_cast<std::uint8_t>(row);
    if (row < num_rows) terms.weights[row] = 1.0F;  // fma(1, s, acc) is acc + s
  }
  __syncwarp();
  return num_rows;
}
static_assert(kMaxNodes <= kWarpLanes && kMaxNodes + kMaxBiases <= kMaxTerms);

/// A warp's view of the sums that have come back, and of those that this node's ranks keep. Lane n sees node n.
class ReturnedSums {
 public:
  __device__ ReturnedSums(const ExchangeParams& params, std::uint64_t exchange) : params_(params), exchange_(exchange) {
    const int node = lane_idx();
    if (node >= params.rails.num_nodes) return;
    if (node != params.rails.node) {
      first_ = params.flows[node].first_in;
    } else if (params.sums_nodes) {
      first_ = params.node_sums.to_nodes[node].first_in;
      first_turn_ = SumTurns(params.rails, params.node_sums.to_nodes).num_for_peers();
    }
  }

  /// Waits for the sums of a token; false if the group broke. All lanes of a warp.
  __device__ bool await(std::int64_t token) {
    const int node = lane_idx();
    bool here = true;
    if (node < params_.rails.num_nodes) {
      const std::int64_t item = item_of(params_.token_sums, node, token);
      if (item >= 0 && node != params_.rails.node) {
        here = await_count(node, static_cast<std::uint64_t>(item - first_ + 1));
      } else if (item >= 0 && params_.sums_nodes) {
        here = await_turn(params_, first_turn_ + item - first_, exchange_);
      }
    }
    here = __all_sync(kAllLanes, static_cast<int>(here)) != 0;
    __syncwarp();  // passes the data that one lane acquired to all lanes
    return here;
  }

 private:
  __device__ bool await_count(int node, std::uint64_t wanted) {
    if (seen_ >= wanted) return true;
    const std::uint64_t* const word = &params_.rails.state->returned[node];
    const auto read = [word, exchange = exchange_] {
      const std::uint64_t count = load_acquire_device(word);
      return count >> 32 == half_of(exchange) ? half_of(count) : 0;
    };
    // The blocks that wait for the network find out that it stands still.
    const Wait wait{Awaited::kOwn, params_.ranks.rank, exchange_};
    seen_ = wait_while_growing(params_.ranks, wait, read, wanted);
    return seen_ >= wanted;
  }

  const ExchangeParams& params_;
  std::uint64_t exchange_;
  std::int64_t first_ = 0;       ///< position of the node's first item
  std::int64_t first_turn_ = 0;  ///< of this node's items
  std::uint64_t seen_ = 0;
};

/// Writes the sums of this rank's tokens. `block`: number among the blocks that do. All threads of a block; `terms`: of
/// its warps.
template <bool kFloat32>
__device__ void sum_arriving(const ExchangeParams& params, std::uint64_t exchange, int block, Terms* terms) {
  const TokenSumParams& sums = params.token_sums;
  Terms& of_warp = terms[warp_idx()];
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  ReturnedSums returned(params, exchange);
#pragma unroll 1
  for (std::int64_t token = warp_idx() * params.num_own_blocks + block; token < sums.num_tokens;
       token += std::int64_t{params.num_own_blocks} * num_warps) {
    if (!returned.await(token)) return;
    const int num_rows = collect_nodes(sums, token, of_warp);
    if (sums.returns_weights) sum_token_weights(sums, token);
    sum_rows<kFloat32>(of_warp, num_rows, sums.out_x + token * sums.out_stride, sums.row_bytes);
    __syncwarp();  // all lanes have read the terms
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_TOKEN_SUM_CUH
