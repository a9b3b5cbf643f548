/// Last step of route: assigns every entry its row and destination, and writes the receivers' source tables.

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/entries.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Enough blocks to hide the latencies; few enough that several ranks' kernels fit one GPU while they wait for each
/// other.
constexpr int kMaxPlaceBlocks = 32;
/// Above every real key; topk added.
constexpr std::uint64_t kNoDestination = std::uint64_t{1} << 62;

/// A destination as one number that orders as (rank, row, topk) does.
__device__ std::uint64_t destination_key(int rank, std::int32_t row, int topk) {
  return static_cast<std::uint64_t>(rank) << 40 | static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) << 6 |
         static_cast<std::uint64_t>(topk);
}

/// Rows of a token's entries, from the warp's running positions.
struct Rows {
  std::int32_t row = -1;
  std::int32_t token_row = -1;
};

/// Position of each first lane in its run, in lane order; advances the run. All lanes call it.
__device__ std::int32_t take_position(std::int32_t* next, int run, bool first) {
  const unsigned none = 0x80000000U | static_cast<unsigned>(lane_idx());
  const unsigned same = __match_any_sync(0xFFFFFFFFU, first ? static_cast<unsigned>(run) : none);
  const unsigned below = same & ((1U << lane_idx()) - 1U);
  std::int32_t position = 0;
  if (first) position = next[run] + __popc(below);
  __syncwarp();
  if (first && below == 0) next[run] += __popc(same);
  __syncwarp();
  return position;
}

__device__ Rows take_rows(const RouteParams& params, const Entry& entry, std::int32_t* next) {
  const int num_ranks = params.ranks.num_ranks;
  const bool by_token = params.layout == Layout::kTokens;
  Rows rows;
  const std::int32_t token_row = take_position(next, entry.owner, entry.first_of_rank);
  const std::int32_t row = by_token ? token_row : take_position(next, num_ranks + entry.expert, entry.first_of_expert);
  // Entries of one rank, or one expert, share the first one's row.
  const int rank_leader = entry.expert >= 0 ? __ffs(static_cast<int>(entry.same_rank)) - 1 : lane_idx();
  const int expert_leader = entry.expert >= 0 ? __ffs(static_cast<int>(entry.same_expert)) - 1 : lane_idx();
  rows.token_row = __shfl_sync(0xFFFFFFFFU, token_row, rank_leader);
  rows.row = __shfl_sync(0xFFFFFFFFU, row, by_token ? rank_leader : expert_leader);
  return rows;
}

/// Writes a token's destinations in ascending order. All lanes call it.
__device__ void write_destinations(const RouteParams& params, const Entry& entry, const Rows& rows) {
  const int width = lanes_per_token(params.num_topk);
  const int first_lane = lane_idx() / width * width;
  const bool present = entry.exists && entry.expert >= 0;
  const std::uint64_t key = present ? destination_key(entry.owner, rows.row, entry.topk)
                                    : kNoDestination + static_cast<std::uint64_t>(entry.topk);
  int position = 0;
  bool first_of_row = true;
  bool first_of_rank = true;
  for (int i = 0; i < width; ++i) {
    const std::uint64_t other = __shfl_sync(0xFFFFFFFFU, key, first_lane + i);
    if (other >= key) continue;
    ++position;
    if (other >> 6 == key >> 6) first_of_row = false;
    if (other >> 40 == key >> 40) first_of_rank = false;
  }
  if (!entry.exists) return;
  const std::int64_t at = entry.token * params.num_topk;
  Destination destination{};
  destination.rank = -1;
  destination.topk = static_cast<std::uint8_t>(entry.topk);
  if (present) {
    destination.local_expert = params.placement.local_expert[entry.expert];
    destination.row = rows.row;
    destination.token_row = rows.token_row;
    destination.rank = static_cast<std::int16_t>(entry.owner);
    destination.flags =
        static_cast<std::uint8_t>((first_of_row ? kFirstOfRow : 0) | (first_of_rank ? kFirstOfRank : 0));
  }
  params.tables.destinations[at + position] = destination;
  params.tables.slots[at + entry.topk] = present ? rows.row : -1;
  params.tables.ids[at + entry.topk] = entry.expert;
  if (params.weights != nullptr) params.tables.weights[at + entry.topk] = params.weights[at + entry.topk];
}

/// Writes the source of each new row into the receiver's table.
__device__ void write_source(const PlaceParams& params, const Entry& entry, const Rows& rows) {
  const RouteParams& route = params.route;
  const bool first = route.layout == Layout::kTokens ? entry.first_of_rank : entry.first_of_expert;
  if (!first) return;
  const volatile EntryMessage& message = route.ranks.control.messages[entry.owner];
  auto* table = reinterpret_cast<int2*>(route.ranks.peer_bases[entry.owner] + message.tables_offset);
  table[rows.row] = make_int2(route.ranks.rank, static_cast<int>(entry.token));
}

/// Positions before each warp of counting block `block`, in `next` [warps, runs].
__device__ void fill_next(const RouteParams& params, int block, std::int32_t* next) {
  const int num_ranks = params.ranks.num_ranks;
  const int num_runs = num_ranks + params.num_experts;
  for (int i = static_cast<int>(threadIdx.x); i < num_runs * kRouteWarps; i += kRouteThreads) next[i] = 0;
  __syncthreads();
  std::int32_t* mine = next + warp_idx() * num_runs;
  const TokenRange range = tokens_of_warp(params, block);
  const int step = kWarpLanes / lanes_per_token(params.num_topk);
  for (std::int64_t token = range.begin; token < range.end; token += step) {
    const Entry entry = load_entry(params, token, range.end);
    if (entry.first_of_rank) atomicAdd(&mine[entry.owner], 1);
    if (entry.first_of_expert) atomicAdd(&mine[num_ranks + entry.expert], 1);
  }
  __syncthreads();
  for (int run = static_cast<int>(threadIdx.x); run < num_runs; run += kRouteThreads) {
    const bool is_rank = run < num_ranks;
    const int expert = run - num_ranks;
    std::int32_t base =
        is_rank ? params.tables.rank_base[run] + params.tables.block_ranks[block * num_ranks + run]
                : params.tables.expert_base[expert] + params.tables.block_experts[block * params.num_experts + expert];
    for (int warp = 0; warp < kRouteWarps; ++warp) {
      const std::int32_t count = next[warp * num_runs + run];
      next[warp * num_runs + run] = base;
      base += count;
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kRouteThreads) place_kernel(PlaceParams params) {
  extern __shared__ std::int32_t next[];  // [warps, R + E]
  const RouteParams& route = params.route;
  const RankParams& ranks = route.ranks;
  if (is_broken(ranks) || route.tables.summary->valid == 0) return;
  const std::uint64_t epoch = current_epoch(ranks);
  if (blockIdx.x == 0 && warp_idx() == 0) post_entry(ranks, params.entry, epoch);
  const Outcome outcome = await_entries(ranks, params.entry, epoch);
  if (outcome == Outcome::kStop) return;
  if (outcome == Outcome::kSkip && blockIdx.x == 0 && threadIdx.x == 0) report_disagreement(ranks, epoch);
  const int num_runs = ranks.num_ranks + route.num_experts;
  for (int block = static_cast<int>(blockIdx.x); outcome == Outcome::kGo && block < route.num_blocks;
       block += static_cast<int>(gridDim.x)) {
    fill_next(route, block, next);
    const TokenRange range = tokens_of_warp(route, block);
    const int step = kWarpLanes / lanes_per_token(route.num_topk);
    for (std::int64_t token = range.begin; token < range.end; token += step) {
      const Entry entry = load_entry(route, token, range.end);
      const Rows rows = take_rows(route, entry, next + warp_idx() * num_runs);
      write_destinations(route, entry, rows);
      write_source(params, entry, rows);
    }
    __syncthreads();
  }
  __syncthreads();
  LocalState& local = *ranks.control.local;
  if (threadIdx.x == 0) {
    fence_system();
    add_acq_rel_device(&local.num_blocks_done, 1);
  }
  if (blockIdx.x != 0 || warp_idx() != 0) return;
  const bool own = wait_until(
      ranks, {Awaited::kOwn, ranks.rank, epoch},
      [&local] { return static_cast<std::uint64_t>(load_acquire_device(&local.num_blocks_done)); }, gridDim.x);
  if (__all_sync(0xFFFFFFFFU, own) == 0) return;
  if (lane_idx() == 0) local.num_blocks_done = 0;
  post_done(ranks, epoch);
  finish_call(ranks, epoch);
}

}  // namespace

std::size_t place_shared_bytes(int num_ranks, std::int64_t num_experts) {
  return static_cast<std::size_t>(kRouteWarps) * static_cast<std::size_t>(num_ranks + num_experts) *
         sizeof(std::int32_t);
}

cudaError_t launch_place(const PlaceParams& params, cudaStream_t stream) {
  const RouteParams& route = params.route;
  const int most = route.max_blocks < kMaxPlaceBlocks ? route.max_blocks : kMaxPlaceBlocks;
  const int num_blocks = route.num_blocks < most ? route.num_blocks : most;
  const std::size_t shared_bytes = place_shared_bytes(route.ranks.num_ranks, route.num_experts);
  return launch_kernel(place_kernel, {static_cast<unsigned>(num_blocks), kRouteThreads, shared_bytes}, params, stream);
}

cudaError_t load_count_kernel();
cudaError_t load_exchange_kernel();

cudaError_t load_route_kernels(std::size_t shared_limit) {
  const auto most_bytes = static_cast<int>(std::min(place_shared_bytes(kMaxRanks, kMaxExperts), shared_limit));
  if (const cudaError_t error = load_count_kernel(); error != cudaSuccess) return error;
  if (const cudaError_t error = load_exchange_kernel(); error != cudaSuccess) return error;
  return cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_bytes);
}

}  // namespace ferry::cuda
