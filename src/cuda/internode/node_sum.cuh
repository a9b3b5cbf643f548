#ifndef FERRY_CUDA_INTERNODE_NODE_SUM_CUH
#define FERRY_CUDA_INTERNODE_NODE_SUM_CUH

/// Sums of a node in a combine over several nodes, by blocks of the exchange that returns them. One warp per item.

#include "cuda/internode/exchange_params.hpp"
#include "cuda/internode/sum_turns.cuh"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/sync/entry.cuh"

namespace ferry::cuda::device {

// As many loads at a time as the registers of the exchange's blocks hold. With seven steps of two rows a combine of
// 4,096 tokens took 1.07 ms instead of 0.98 on 4 H200, since registers are saved and restored for every item.

template <bool kFloat32>
__device__ __noinline__ void sum_two_rows(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  sum_row<kFloat32, 2, 4>(terms, num_rows, out, row_bytes);
}

template <bool kFloat32>
__device__ __noinline__ void sum_more_rows(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  if (num_rows <= 4) {
    sum_row<kFloat32, 4, 2>(terms, num_rows, out, row_bytes);
  } else {
    sum_row<kFloat32, 8, 1>(terms, num_rows, out, row_bytes);
  }
}

template <bool kFloat32>
__device__ void sum_rows(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  if (num_rows <= 2) {
    sum_two_rows<kFloat32>(terms, num_rows, out, row_bytes);
  } else {
    sum_more_rows<kFloat32>(terms, num_rows, out, row_bytes);
  }
}

/// Location of the rows of a rank of the node. In shared memory, one per rank.
struct SumHolder {
  const std::byte* rows;
  std::int64_t row_stride;
  const float* weights;
};

/// Fills `terms` with the rows of an item, each with its weights; returns the number of rows.
__device__ inline int collect_rows(const NodeSumParams& params, const SumHolder* holders, std::int64_t item,
                                   const Destination& destination, Terms& terms) {
  const bool present = destination.rank >= 0;
  const bool first = present && (destination.flags & kFirstOfRow) != 0;
  const bool counts = params.weighted ? present : first;
  const unsigned rows = __ballot_sync(kAllLanes, first);
  const unsigned weights = __ballot_sync(kAllLanes, counts);
  const unsigned below = (1U << lane_idx()) - 1U;
  const int weight_idx = __popc(weights & below);
  if (first) {
    const SumHolder& holder = holders[destination.rank];
    const int row_idx = __popc(rows & below);
    terms.rows[row_idx] = holder.rows + destination.row * holder.row_stride;
    terms.first_weight[row_idx] = static_cast<std::uint8_t>(weight_idx);
  }
  if (counts) {
    terms.weights[weight_idx] = params.weighted ? params.topk_weights[item * params.num_topk + destination.topk] : 1.0F;
  }
  if (lane_idx() == 0) terms.first_weight[__popc(rows)] = static_cast<std::uint8_t>(__popc(weights));
  __syncwarp();
  return __popc(rows);
}

/// kTokens: entry k becomes the sum of the weights that the node's ranks returned for entry k. Other layouts: the
/// weight of the entry's row.
__device__ inline void sum_item_weights(const NodeSumParams& params, const SumHolder* holders, std::int64_t item,
                                        const Destination& destination) {
  float* out = params.sum_weights + item * params.num_topk;
  if (!params.one_row_per_token) {
    if (lane_idx() < params.num_topk) out[lane_idx()] = 0.0F;
    __syncwarp();
    if (destination.rank >= 0) out[destination.topk] = holders[destination.rank].weights[destination.row];
    return;
  }
  float sum = 0.0F;
  const unsigned rows = __ballot_sync(kAllLanes, destination.rank >= 0 && (destination.flags & kFirstOfRow) != 0);
  for (unsigned left = rows; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int rank = __shfl_sync(kAllLanes, static_cast<int>(destination.rank), lane);
    const std::int64_t row = __shfl_sync(kAllLanes, destination.row, lane);
    if (lane_idx() < params.num_topk) {
      sum = __fadd_rn(sum, holders[rank].weights[row * params.num_topk + lane_idx()]);
    }
  }
  if (lane_idx() < params.num_topk) out[lane_idx()] = sum;
}

template <bool kFloat32>
__device__ void sum_item(const NodeSumParams& params, const SumHolder* holders, std::int64_t item, Terms& terms) {
  Destination destination{};
  destination.rank = -1;
  if (lane_idx() < params.num_topk) {
    const uint4 raw = reinterpret_cast<const uint4*>(params.destinations)[item * params.num_topk + lane_idx()];
    destination = *reinterpret_cast<const Destination*>(&raw);
  }
  const int num_rows = collect_rows(params, holders, item, destination, terms);
  if (params.returns_weights) sum_item_weights(params, holders, item, destination);
  sum_rows<kFloat32>(terms, num_rows, params.sums + item * params.row_bytes, params.row_bytes);
  __syncwarp();  // all lanes have read the terms
}

/// Parts of shared memory of a block that makes sums.
struct SumMemory {
  Terms* terms;        ///< [warps of a block]
  SumHolder* holders;  ///< [ranks of the node]
  int* num_blocks;     ///< [ranks of the node] blocks of each rank that make sums

  static constexpr std::size_t size_bytes(std::size_t num_warps, std::size_t num_ranks) {
    return num_warps * sizeof(Terms) + num_ranks * (sizeof(SumHolder) + sizeof(int));
  }
  __device__ static SumMemory at(std::byte* base, int num_ranks) {
    SumMemory memory{};
    memory.terms = reinterpret_cast<Terms*>(base);
    memory.holders = reinterpret_cast<SumHolder*>(memory.terms + blockDim.x / kWarpLanes);
    memory.num_blocks = reinterpret_cast<int*>(memory.holders + num_ranks);
    return memory;
  }
};

/// Finds the rows of the node's ranks, and whether these make the same call. `block`: number among the blocks that make
/// sums. All threads of a block.
__device__ __noinline__ inline Outcome find_rows(const ExchangeParams& params, std::uint64_t epoch, int block,
                                                 const SumMemory& memory) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarpLanes;
  // Where the exchange begins the call, the block that decides posts the entry and counts the waits.
  const bool leads = block == 0 && !params.begins_call;
  if (leads && warp_idx() == num_warps - 1) post_entry(params.ranks, params.entry, epoch);
  const auto take = [&params, &memory](int rank, const ReceivedEntry& entry) {
    const std::byte* base = params.ranks.peer_bases[rank];
    const SumHolder holder{base + entry.rows_offset(), entry.rows_stride(),
                           reinterpret_cast<const float*>(base + entry.weights_offset())};
    const int num_blocks = entry.num_blocks();
    if (lane_idx() == 0) {
      memory.holders[rank] = holder;
      memory.num_blocks[rank] = num_blocks;
    }
  };
  return await_entries(params.ranks, params.entry, epoch, take, leads);
}

/// Makes the sums of this node that this rank forwards or keeps.
template <bool kFloat32>
__device__ void sum_items(const ExchangeParams& params, std::uint64_t exchange, int block, const SumMemory& memory) {
  const SumTurns turns(params.rails, params.node_sums.to_nodes);
  const int num_warps = params.num_sum_warps();
  const int warp = warp_idx() * params.num_own_blocks + block;
  const std::int64_t num_turns = turns.num_turns();
  SumReport report(params.rails, exchange, warp, params.node_sums.row_bytes);
#pragma unroll 1
  for (std::int64_t turn = warp; turn < num_turns; turn += num_warps) {
    const std::int64_t item = turns.item_of(turn);
    if (item >= 0) sum_item<kFloat32>(params.node_sums, memory.holders, item, memory.terms[warp_idx()]);
    report.add(turn + num_warps >= num_turns);
  }
}

/// Stands for sum_items() where the ranks of the node disagree on the call: lets the blocks at the rings send the
/// chunks that they have promised, which the peers will drop.
__device__ __noinline__ inline void skip_items(const ExchangeParams& params, std::uint64_t exchange, int block) {
  const int warp = warp_idx() * params.num_own_blocks + block;
  SumReport(params.rails, exchange, warp, params.node_sums.row_bytes).give_up();
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTERNODE_NODE_SUM_CUH
