/// Sums of a node in a combine over several nodes. One warp per item.

#include "cuda/driver/launch.hpp"
#include "cuda/internode/combine_params.hpp"
#include "cuda/internode/sum_turns.cuh"
#include "cuda/numeric/row_sum.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// As many warps as registers allow without spilling the loads in flight.
constexpr int kSumThreads = kSumWarps * kWarpLanes;

/// Location of the rows of a rank of the node. In shared memory, one per rank.
struct Holder {
  const std::byte* rows;
  std::int64_t row_stride;
  const float* weights;
  int num_blocks;
};

template <bool kFloat32>
__device__ void sum_terms(const Terms& terms, int num_rows, std::byte* out, std::int64_t row_bytes) {
  // As many loads at a time as registers hold, in two shapes: few rows and many rows.
  if (num_rows <= 4) {
    sum_row<kFloat32, 4, 3>(terms, num_rows, out, row_bytes);
  } else {
    sum_row<kFloat32, 8, 2>(terms, num_rows, out, row_bytes);
  }
}

/// Fills `terms` with the rows of an item, each with its weights; returns the number of rows.
__device__ int collect_rows(const NodeSumParams& params, const Holder* holders, std::int64_t item,
                            const Destination& destination, Terms& terms) {
  const bool present = destination.rank >= 0;
  const bool first = present && (destination.flags & kFirstOfRow) != 0;
  const bool counts = params.weighted ? present : first;
  const unsigned rows = __ballot_sync(kAllLanes, first);
  const unsigned weights = __ballot_sync(kAllLanes, counts);
  const unsigned below = (1U << lane_idx()) - 1U;
  const int weight_idx = __popc(weights & below);
  if (first) {
    const Holder& holder = holders[destination.rank];
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
__device__ void sum_item_weights(const NodeSumParams& params, const Holder* holders, std::int64_t item,
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
__device__ void sum_item(const NodeSumParams& params, const Holder* holders, std::int64_t item, Terms& terms) {
  Destination destination{};
  destination.rank = -1;
  if (lane_idx() < params.num_topk) {
    const uint4 raw = reinterpret_cast<const uint4*>(params.destinations)[item * params.num_topk + lane_idx()];
    destination = *reinterpret_cast<const Destination*>(&raw);
  }
  const int num_rows = collect_rows(params, holders, item, destination, terms);
  if (params.returns_weights) sum_item_weights(params, holders, item, destination);
  sum_terms<kFloat32>(terms, num_rows, params.sums + item * params.row_bytes, params.row_bytes);
  __syncwarp();  // all lanes have read the terms
}

template <bool kFloat32>
__device__ void sum_items(const NodeSumParams& params, const Holder* holders, Terms& terms) {
  const SumTurns turns(params.rails, params.to_nodes);
  const int num_warps = params.num_blocks * kSumWarps;
  const int warp = warp_idx() * params.num_blocks + static_cast<int>(blockIdx.x);
  const std::int64_t num_for_peers = turns.num_for_peers();
  SumReport report(params.rails, warp, params.row_bytes);
  for (std::int64_t turn = warp; turn < turns.num_turns(); turn += num_warps) {
    const std::int64_t item = turns.item_of(turn);
    if (item >= 0) sum_item<kFloat32>(params, holders, item, terms);
    if (params.overlaps && turn < num_for_peers) report.add(turn + num_warps >= num_for_peers);
  }
}

template <bool kFloat32>
__global__ void __launch_bounds__(kSumThreads, 1) node_sum_kernel(const __grid_constant__ NodeSumParams params) {
  const RankParams& ranks = params.ranks;
  const CallStart start = start_call(ranks, params.gate);
  if (start.broken || !start.routed) return;
  auto* terms = reinterpret_cast<Terms*>(dynamic_shared());
  auto* holders = reinterpret_cast<Holder*>(terms + kSumWarps);
  auto* num_blocks = reinterpret_cast<int*>(holders + ranks.num_ranks);
  const bool first = blockIdx.x == 0;
  if (first && warp_idx() == kSumWarps - 1) post_entry(ranks, params.entry, start.epoch);
  const Outcome outcome = await_entries(ranks, params.entry, start.epoch, [&](int rank, const ReceivedEntry& entry) {
    const std::byte* base = ranks.peer_bases[rank];
    const Holder holder{base + entry.rows_offset(), entry.rows_stride(),
                        reinterpret_cast<const float*>(base + entry.tables_offset()), entry.num_blocks()};
    if (lane_idx() == 0) {
      holders[rank] = holder;
      num_blocks[rank] = holder.num_blocks;
    }
  });
  if (outcome == Outcome::kStop) return;
  let_next_kernel_begin();  // not earlier: the next kernel would hold multiprocessors while this one waits for the
                            // node's ranks
  if (outcome == Outcome::kGo) sum_items<kFloat32>(params, holders, terms[warp_idx()]);
  post_block_done(ranks, start.epoch);
  if (first) finish_blocks(ranks, start.epoch, num_blocks);
}

std::size_t node_sum_shared_bytes(int num_ranks) {
  return kSumWarps * sizeof(Terms) + static_cast<std::size_t>(num_ranks) * (sizeof(Holder) + sizeof(int));
}

}  // namespace

cudaError_t launch_node_sums(const NodeSumParams& params, cudaStream_t stream) {
  return launch_kernel(
      params.float32 ? node_sum_kernel<true> : node_sum_kernel<false>,
      {static_cast<unsigned>(params.num_blocks), kSumThreads, node_sum_shared_bytes(params.ranks.num_ranks)}, params,
      stream);
}

cudaError_t load_node_combine_kernels() {
  cudaFuncAttributes attributes;
  for (const auto* kernel :
       {reinterpret_cast<const void*>(node_sum_kernel<false>), reinterpret_cast<const void*>(node_sum_kernel<true>)}) {
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
