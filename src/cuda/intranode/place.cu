/// Last step of route: assigns every entry its row and destination, writes this rank's part of each receiver's source
/// table, and ends the call.

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/entries.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kPlaceThreads = 256;
constexpr int kPlaceWarps = kPlaceThreads / kWarpLanes;
/// Rows of a bounded table that each thread looks at; larger tables take more blocks.
constexpr std::int64_t kRowsPerThread = 4;
/// Key above every real key; topk is added to it.
constexpr std::uint64_t kNoDestination = std::uint64_t{1} << 62;

/// Tokens of one warp of one counting block.
struct TokenRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

__device__ TokenRange tokens_of_warp(const RouteParams& params, int block) {
  const int per_warp = params.tokens_per_block / kPlaceWarps;
  TokenRange range;
  range.begin = static_cast<std::int64_t>(block) * params.tokens_per_block + warp_idx() * per_warp;
  range.end = range.begin + per_warp;
  if (range.end > params.num_tokens) range.end = params.num_tokens;
  return range;
}

/// Number of runs whose positions a warp keeps: token rows of each rank, then, in layouts grouped by expert, rows of
/// each expert.
__host__ __device__ int num_runs_of(const RouteParams& params) {
  return params.ranks.num_ranks + (params.layout == Layout::kTokens ? 0 : params.num_experts);
}

/// Number that orders destinations by (rank, row, topk).
__device__ std::uint64_t destination_key(int rank, std::int32_t row, int topk) {
  return static_cast<std::uint64_t>(rank) << 40 | static_cast<std::uint64_t>(static_cast<std::uint32_t>(row)) << 6 |
         static_cast<std::uint64_t>(topk);
}

/// An entry, and its data from this rank's own tables.
struct PlacedEntry {
  Entry entry;
  std::int32_t local_expert = 0;
  float weight = 0;
};

__device__ PlacedEntry placed_entry(const RouteParams& params, const LoadedId& loaded) {
  PlacedEntry placed;
  if (loaded.exists && params.weights != nullptr) {
    placed.weight = params.weights[loaded.token * params.num_topk + loaded.topk];
  }
  placed.entry = entry_of(params, params.placement, loaded);
  if (placed.entry.expert >= 0) placed.local_expert = params.placement.local_expert[placed.entry.expert];
  return placed;
}

/// Entries of a warp's first steps, kept in registers from counting to placing. For T <= 8192 and K <= 8 they are all
/// of the warp's entries. Their inputs are available before the peers' counts.
constexpr int kKeptSteps = 2;
struct KeptEntries {
  PlacedEntry steps[kKeptSteps];
};

/// Rows of a token's entries, computed from the warp's running positions.
struct Rows {
  std::int32_t row = -1;
  std::int32_t token_row = -1;
};

__device__ Rows take_rows(const RouteParams& params, const Entry& entry, std::int32_t* next) {
  const int num_ranks = params.ranks.num_ranks;
  const bool by_token = params.layout == Layout::kTokens;
  Rows rows;
  const std::int32_t token_row = take_position(next, entry.owner, entry.first_of_rank);
  const std::int32_t row = by_token ? token_row : take_position(next, num_ranks + entry.expert, entry.first_of_expert);
  // Entries of one rank, or one expert, share the row of the first one.
  const int rank_leader = entry.expert >= 0 ? __ffs(static_cast<int>(entry.same_rank)) - 1 : lane_idx();
  const int expert_leader = entry.expert >= 0 ? __ffs(static_cast<int>(entry.same_expert)) - 1 : lane_idx();
  rows.token_row = __shfl_sync(0xFFFFFFFFU, token_row, rank_leader);
  rows.row = __shfl_sync(0xFFFFFFFFU, row, by_token ? rank_leader : expert_leader);
  return rows;
}

/// Writes a token's destinations in ascending order. All lanes call it.
__device__ void write_destinations(const RouteParams& params, const PlacedEntry& placed, const Rows& rows) {
  const Entry& entry = placed.entry;
  const int width = TokenLanes(params.num_topk).width();
  const int first_lane = lane_idx() & ~(width - 1);
  const bool present = entry.exists && entry.expert >= 0;
  const std::uint64_t key = present ? destination_key(entry.owner, rows.row, entry.topk)
                                    : kNoDestination + static_cast<std::uint64_t>(entry.topk);
  int position = 0;
  bool first_of_row = true;
  bool first_of_rank = true;
#pragma unroll 1
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
    destination.local_expert = placed.local_expert;
    destination.row = rows.row;
    destination.token_row = rows.token_row;
    destination.rank = static_cast<std::int16_t>(entry.owner);
    destination.flags =
        static_cast<std::uint8_t>((first_of_row ? kFirstOfRow : 0) | (first_of_rank ? kFirstOfRank : 0));
  }
  params.tables.destinations[at + position] = destination;
  params.tables.slots[at + entry.topk] = present ? rows.row : -1;
  params.tables.homes[at + entry.topk] = present ? home_of(entry.owner, destination.local_expert) : -1;
  params.tables.ids[at + entry.topk] = entry.expert;
  if (params.weights != nullptr) params.tables.weights[at + entry.topk] = placed.weight;
}

/// Appends the token to the lists of tokens for each of its ranks.
__device__ void write_sent_token(const RouteParams& params, const Entry& entry, const Rows& rows) {
  if (!entry.first_of_rank) return;
  const std::int32_t idx = rows.token_row - params.tables.rank_base[entry.owner];
  params.tables.sent_tokens[entry.owner * params.num_tokens + idx] = static_cast<std::int32_t>(entry.token);
}

/// Writes the source of each new row into the receiver's table.
__device__ void write_source(const RouteParams& params, int2* const* sources, const Entry& entry, const Rows& rows) {
  const bool first = params.layout == Layout::kTokens ? entry.first_of_rank : entry.first_of_expert;
  if (first) sources[entry.owner][rows.row] = make_int2(params.ranks.rank, static_cast<int>(entry.token));
}

/// Adds an entry to the runs of its warp.
__device__ void count_entry(const RouteParams& params, const Entry& entry, std::int32_t* runs) {
  if (entry.first_of_rank) atomicAdd(&runs[entry.owner], 1);
  if (params.layout != Layout::kTokens && entry.first_of_expert) {
    atomicAdd(&runs[params.ranks.num_ranks + entry.expert], 1);
  }
}

/// Counts the runs of each warp of counting block `block`, in `next` [warps, runs]. Uses no result of the exchange.
__device__ KeptEntries count_runs(const RouteParams& params, int block, std::int32_t* next) {
  const int num_runs = num_runs_of(params);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_runs * kPlaceWarps; i += kPlaceThreads) next[i] = 0;
  __syncthreads();
  std::int32_t* mine = next + warp_idx() * num_runs;
  const TokenRange range = tokens_of_warp(params, block);
  const int step = TokenLanes(params.num_topk).tokens_per_warp();
  LoadedId ids[kKeptSteps];
#pragma unroll
  for (int i = 0; i < kKeptSteps; ++i) ids[i] = load_lane_id(params, range.begin + i * step, range.end);
  KeptEntries kept;
#pragma unroll
  for (int i = 0; i < kKeptSteps; ++i) {
    kept.steps[i] = placed_entry(params, ids[i]);
    count_entry(params, kept.steps[i].entry, mine);
  }
#pragma unroll 1
  for (std::int64_t token = range.begin + kKeptSteps * step; token < range.end; token += step) {
    count_entry(params, load_entry(params, token, range.end), mine);
  }
  return kept;
}

/// The first position of a run in counting block `block`.
__device__ std::int32_t run_base(const RouteParams& params, int block, int run) {
  const int num_ranks = params.ranks.num_ranks;
  const auto columns = plan::CountColumns::of(num_ranks, params.num_experts);
  const std::int32_t* const before = params.tables.block_counts + static_cast<std::int64_t>(block) * columns.size;
  const int expert = run - num_ranks;
  return run < num_ranks ? params.tables.rank_base[run] + before[run]
                         : params.tables.expert_base[expert] + before[columns.first_expert + expert];
}

/// Turns the counts of count_runs into positions before each warp. `first_base`: base of the run with the thread's
/// number.
__device__ void fill_next(const RouteParams& params, int block, std::int32_t first_base, std::int32_t* next) {
  const int num_runs = num_runs_of(params);
  __syncthreads();
#pragma unroll 1
  for (int run = static_cast<int>(threadIdx.x); run < num_runs; run += kPlaceThreads) {
    std::int32_t base = run < kPlaceThreads ? first_base : run_base(params, block, run);
    for (int warp = 0; warp < kPlaceWarps; ++warp) {
      const std::int32_t count = next[warp * num_runs + run];
      next[warp * num_runs + run] = base;
      base += count;
    }
  }
  __syncthreads();
}

/// Results of the exchange that a thread needs first. They are loaded together with the values that start the call,
/// since each load may go to memory. They are not meaningful if the route is invalid.
struct FirstLoads {
  std::int64_t own_source;  ///< offset of this rank's source table
  std::int64_t source;      ///< offset of the source table of the rank with the thread's number
  std::byte* base;          ///< base of that rank's memory
  std::int32_t run_base;    ///< in the first block: base of the run with the thread's number
};

__device__ FirstLoads load_first(const RouteParams& params) {
  const RankParams& ranks = params.ranks;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto block = static_cast<int>(blockIdx.x);
  FirstLoads loads{};
  loads.own_source = params.tables.source_offsets[ranks.rank];
  if (thread < ranks.num_ranks) {
    loads.source = params.tables.source_offsets[thread];
    loads.base = ranks.peer_bases[thread];
  }
  if (block < params.num_blocks && thread < num_runs_of(params)) loads.run_base = run_base(params, block, thread);
  return loads;
}

/// Finds every rank's source table, in `sources` [R] (shared memory); false if the group broke. All threads of a block
/// call it.
__device__ bool find_sources(const RankParams& ranks, const FirstLoads& loads, std::uint64_t epoch, int2** sources) {
  bool here = true;
  if (const int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks) {
    std::int64_t offset = loads.source;
    if (offset == kAnnouncedLater) {
      here = wait_entry_field(ranks, rank, epoch, offsetof(EntryMessage, tables_offset), offset);
    }
    sources[rank] = reinterpret_cast<int2*>(loads.base + offset);
  }
  return __syncthreads_and(here ? 1 : 0) != 0;
}
static_assert(kMaxRanks <= kPlaceThreads, "one thread per rank");

/// Marks the rows of this rank that hold no token with source -1. No other rank writes to them. All threads of all
/// blocks call it; `memory` is the block's shared memory.
__device__ void mark_gaps(const PlaceParams& params, bool valid, std::int32_t* memory) {
  const RouteParams& route = params.route;
  const std::int64_t num_used = valid ? route.tables.summary->num_used_rows : 0;
  const bool has_gaps =
      valid && (route.layout == Layout::kSlab || (route.layout == Layout::kExperts && route.expert_alignment > 1));
  const int num_groups = has_gaps ? route.num_local_experts : 0;
  std::int32_t* const offsets = memory;  // [L + 1]
  std::int32_t* const group_rows = memory + num_groups + 1;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); has_gaps && i <= num_groups; i += kPlaceThreads) {
    offsets[i] = static_cast<std::int32_t>(route.tables.row_offsets[i]);
    if (i < num_groups) group_rows[i] = route.tables.rows_per_expert[i];
  }
  __syncthreads();
  const std::int64_t first = has_gaps ? 0 : num_used;
  const std::int64_t end = params.num_bounded_rows > num_used ? params.num_bounded_rows : num_used;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kPlaceThreads;
#pragma unroll 1
  for (std::int64_t row = first + static_cast<std::int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x; row < end;
       row += step) {
    if (row < num_used && !plan::is_gap(offsets, group_rows, num_groups, static_cast<std::int32_t>(row))) continue;
    reinterpret_cast<int2*>(params.source)[row] = make_int2(-1, -1);
  }
}

/// Part of the shared memory whose size is the same in every call.
struct alignas(kSharedAlignment) PlaceShared {
  int2* sources[kMaxRanks];  ///< each rank's source table
  bool is_last;
};

__global__ void __launch_bounds__(kPlaceThreads) place_kernel(const __grid_constant__ PlaceParams params) {
  auto* const next = reinterpret_cast<std::int32_t*>(dynamic_shared());  // [warps, runs]
  auto& shared = static_shared<PlaceShared>();
  const RouteParams& route = params.route;
  const RankParams& ranks = route.ranks;
  const auto first_block = static_cast<int>(blockIdx.x);
  KeptEntries kept;
  if (first_block < route.num_blocks) kept = count_runs(route, first_block, next);
  await_kernel_before();
  const FirstLoads loads = load_first(route);
  const CallStart start = start_call(ranks, route.tables.summary);
  const std::uint64_t epoch = start.epoch;
  if (start.broken) return;
  if (!start.routed) {
    mark_gaps(params, false, next);
    return;
  }
  // The host launches this step again with a larger table.
  if (!params.announces && loads.own_source == kAnnouncedLater) return;
  if (params.announces && blockIdx.x == 0 && warp_idx() == 0) post_entry(ranks, params.entry, epoch);
  if (!find_sources(ranks, loads, epoch, shared.sources)) return;
  const int num_runs = num_runs_of(route);
#pragma unroll 1
  for (int block = first_block; block < route.num_blocks; block += static_cast<int>(gridDim.x)) {
    std::int32_t first_base = loads.run_base;
    if (block != first_block) {
      kept = count_runs(route, block, next);
      if (static_cast<int>(threadIdx.x) < num_runs) {
        first_base = run_base(route, block, static_cast<int>(threadIdx.x));
      }
    }
    fill_next(route, block, first_base, next);
    const TokenRange range = tokens_of_warp(route, block);
    const int step = TokenLanes(route.num_topk).tokens_per_warp();
    int idx = 0;
#pragma unroll 1
    for (std::int64_t token = range.begin; token < range.end; token += step) {
      PlacedEntry placed = kept.steps[0];
      if (idx == 1) placed = kept.steps[1];
      if (idx >= kKeptSteps) placed = placed_entry(route, load_lane_id(route, token, range.end));
      ++idx;
      const Rows rows = take_rows(route, placed.entry, next + warp_idx() * num_runs);
      write_destinations(route, placed, rows);
      write_sent_token(route, placed.entry, rows);
      write_source(route, shared.sources, placed.entry, rows);
    }
    static_assert(kKeptSteps == 2, "one line above per step");
    __syncthreads();
  }
  mark_gaps(params, true, next);
  __syncthreads();
  if (threadIdx.x == 0) {
    LocalState& local = *ranks.control.local;
    shared.is_last = add_acq_rel_device(&local.num_blocks_done, 1) + 1 == gridDim.x;
    if (shared.is_last) local.num_blocks_done = 0;
  }
  __syncthreads();
  // One release covers the writes of all blocks to the peers, because releases are cumulative.
  if (!shared.is_last || warp_idx() != 0) return;
  post_done(ranks, epoch);
  finish_call(ranks, epoch);
}

/// Bytes of shared memory whose size depends on the call.
std::size_t next_bytes(int num_runs) {
  return static_cast<std::size_t>(kPlaceWarps) * static_cast<std::size_t>(num_runs) * sizeof(std::int32_t);
}

}  // namespace

std::size_t place_shared_bytes(int num_ranks, int num_experts) {
  return sizeof(PlaceShared) + next_bytes(num_ranks + num_experts);
}

cudaError_t launch_place(const PlaceParams& params, cudaStream_t stream) {
  const RouteParams& route = params.route;
  const std::int64_t for_rows = params.num_bounded_rows / (kPlaceThreads * kRowsPerThread);
  const std::int64_t wanted = std::max<std::int64_t>(route.num_blocks, for_rows);
  const auto num_blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, route.max_blocks));
  const LaunchShape shape{num_blocks, kPlaceThreads, next_bytes(num_runs_of(route)), params.overlaps};
  return launch_kernel(place_kernel, shape, params, stream);
}

cudaError_t load_exchange_kernel(std::size_t shared_limit);

cudaError_t load_route_kernels(std::size_t shared_limit) {
  if (const cudaError_t error = load_exchange_kernel(shared_limit); error != cudaSuccess) return error;
  const std::size_t most_bytes = next_bytes(kMaxRanks + static_cast<int>(kMaxExperts));
  return cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(std::min(most_bytes, shared_limit - sizeof(PlaceShared))));
}

}  // namespace ferry::cuda
