/// Gathers the ids of all tokens of the group on every rank: the rank's own, and those held by ranks of its node.

#include "cuda/copy/warp_copy.cuh"
#include "cuda/driver/launch.hpp"
#include "cuda/internode/node_route_params.hpp"
#include "cuda/placement/pick.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kIdsThreads = 512;
constexpr int kGatherThreads = 512;
constexpr int kGatherWarps = kGatherThreads / kWarpLanes;
constexpr unsigned kNoBadEntry = 0xFFFFFFFFU;

__device__ std::int64_t id_at(const IdsParams& params, std::int64_t entry) {
  if (params.wide_ids) return static_cast<const std::int64_t*>(params.topk_idx)[entry];
  return static_cast<const std::int32_t*>(params.topk_idx)[entry];
}

/// Shared memory of the block that reads the ids.
struct IdsShared {
  unsigned first_bad;     ///< kNoBadEntry: none
  unsigned num_homeless;  ///< entries whose expert has no home
};

/// Runs as one block, which finds the first bad id without other blocks.
__global__ void __launch_bounds__(kIdsThreads) ids_kernel(const __grid_constant__ IdsParams params) {
  auto& shared = *reinterpret_cast<IdsShared*>(dynamic_shared());
  if (threadIdx.x == 0) shared = {kNoBadEntry, 0};
  __syncthreads();
  std::int64_t counted = params.num_tokens;
  if (params.num_tokens_view != nullptr) {
    const std::int64_t given = *params.num_tokens_view;
    counted = given < 0 ? 0 : given < counted ? given : counted;
  }
  const std::int64_t num_counted = counted * params.blocks.num_topk;
  const std::int64_t num_entries = params.num_tokens * params.blocks.num_topk;
  const std::int64_t num_places = params.blocks.max_tokens * params.blocks.num_topk;
  auto& header = *reinterpret_cast<IdsHeader*>(params.own);
  auto* sent = reinterpret_cast<std::int32_t*>(&header + 1);
  for (std::int64_t entry = threadIdx.x; entry < num_places; entry += kIdsThreads) {
    const std::int64_t id = entry < num_counted ? id_at(params, entry) : -1;
    const int expert =
        pick_expert(params.placement, params.num_experts, id, entry / params.blocks.num_topk, params.group_rank);
    bool bad = false;
    if (expert < 0 && id != -1) {
      bad = !is_homeless(params.placement, params.num_experts, id);
      if (bad) {
        atomicMin(&shared.first_bad, static_cast<unsigned>(entry));
      } else {
        atomicAdd(&shared.num_homeless, 1U);
      }
    }
    sent[entry] = expert;
    if (entry >= num_entries) continue;
    params.ids[entry] = bad ? id : expert;
    if (params.weights_in != nullptr) params.weights[entry] = params.weights_in[entry];
  }
  for (int node = static_cast<int>(threadIdx.x); node < params.num_nodes; node += kIdsThreads) {
    const auto num_items = static_cast<std::int32_t>(params.blocks.num_items());
    params.flows[node] = {0, num_items, node * num_items, num_items};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  header.num_tokens = counted;
  header.max_recv_rows = params.max_recv_rows;
  header.num_homeless = shared.num_homeless;
  const unsigned bad_entry = shared.first_bad;
  header.bad_entry = bad_entry == kNoBadEntry ? -1 : static_cast<std::int64_t>(bad_entry);
  header.bad_id = bad_entry == kNoBadEntry ? 0 : id_at(params, bad_entry);
  note_bad_homes(params.placement, header.bad_entry, header.bad_id);
  header.homes_hash = hash_of_homes(params.placement);
}

/// Location of the id blocks that a rank of the node received over its rail. In shared memory, one per rank.
struct Holder {
  const std::byte* blocks;
  int num_blocks;
};

__device__ void pull_blocks(const GatherParams& params, const Holder* holders) {
  const int num_sources = params.num_nodes * params.ranks.num_ranks;
  const std::int64_t per_source = params.block_bytes / IdsBlocks::kItemBytes;
  const int num_warps = params.num_blocks * kGatherWarps;
  for (std::int64_t i = static_cast<int>(blockIdx.x) * kGatherWarps + warp_idx(); i < num_sources * per_source;
       i += num_warps) {
    const auto source = static_cast<int>(i / per_source);
    const std::int64_t offset = i % per_source * IdsBlocks::kItemBytes;
    const int rail = source % params.ranks.num_ranks;
    const int node = source / params.ranks.num_ranks;
    copy_by_warp(params.all + source * params.block_bytes + offset,
                 holders[rail].blocks + node * params.block_bytes + offset, IdsBlocks::kItemBytes);
  }
}

__global__ void __launch_bounds__(kGatherThreads, 1) gather_kernel(const __grid_constant__ GatherParams params) {
  const RankParams& ranks = params.ranks;
  const CallStart start = start_call(ranks, params.gate);
  if (start.broken || !start.routed) return;
  auto* holders = reinterpret_cast<Holder*>(dynamic_shared());
  auto* num_blocks = reinterpret_cast<int*>(holders + ranks.num_ranks);
  const bool first = blockIdx.x == 0;
  if (first && warp_idx() == kGatherWarps - 1) post_entry(ranks, params.entry, start.epoch);
  const Outcome outcome = await_entries(ranks, params.entry, start.epoch, [&](int rank, const ReceivedEntry& entry) {
    const Holder holder{ranks.peer_bases[rank] + entry.rows_offset(), entry.num_blocks()};
    if (lane_idx() == 0) {
      holders[rank] = holder;
      num_blocks[rank] = holder.num_blocks;
    }
  });
  if (outcome == Outcome::kStop) return;
  if (outcome == Outcome::kGo) pull_blocks(params, holders);
  post_block_done(ranks, start.epoch);
  if (first) finish_blocks(ranks, start.epoch, num_blocks);
}

}  // namespace

cudaError_t launch_ids(const IdsParams& params, cudaStream_t stream) {
  return launch_kernel(ids_kernel, {1, kIdsThreads, sizeof(IdsShared)}, params, stream);
}

cudaError_t launch_gather(const GatherParams& params, cudaStream_t stream) {
  const std::size_t shared_bytes = static_cast<std::size_t>(params.ranks.num_ranks) * (sizeof(Holder) + sizeof(int));
  return launch_kernel(gather_kernel, {static_cast<unsigned>(params.num_blocks), kGatherThreads, shared_bytes}, params,
                       stream);
}

cudaError_t load_gather_kernels() {
  cudaFuncAttributes attributes;
  if (const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(ids_kernel));
      error != cudaSuccess)
    return error;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(gather_kernel));
}

}  // namespace ferry::cuda
