/// Builds the tables of a route over several nodes from the ids of all tokens of the group, which every rank has.

#include <algorithm>

#include "cuda/driver/launch.hpp"
#include "cuda/internode/node_route_count.cuh"
#include "cuda/placement/counters.cuh"
#include "cuda/placement/pick.cuh"
#include "cuda/sync/entry.cuh"
#include "cuda/sync/shared_memory.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kThreads = kCountWarps * kWarpLanes;
constexpr unsigned kNone = 0xFFFFFFFFU;

/// Whether the ranks agree on the call to which this kernel belongs, and the group is whole.
__device__ bool goes_on(const NodeRouteParams& params) {
  return !is_broken(params.ranks) && static_cast<const volatile RouteSummary&>(params.rails->gate).valid != 0;
}

/// Marks all rows and places as empty. A later kernel fills them; the kernel in between fills a token's items.
__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ NodeRouteParams params) {
  if (!goes_on(params)) return;
  auto* const begin = reinterpret_cast<std::uint32_t*>(params.tables.out_tokens);
  const std::int64_t num_words = reinterpret_cast<std::uint32_t*>(params.tables.ids) - begin;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_words; i += stride) {
    begin[i] = 0xFFFFFFFFU;
  }
}

/// Counts and numbers the tokens of every source, one block per source.
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ NodeRouteParams params) {
  if (!goes_on(params)) return;
  const CountTables tables = CountTables::of(params);
  for (int source = static_cast<int>(blockIdx.x); source < params.num_ranks; source += static_cast<int>(gridDim.x)) {
    SourceCount(params, tables, source).run();
  }
}

/// Shared memory of the sum kernel, followed by [runs] rows of each run.
struct SumShared {
  unsigned first_bad_rank;
  unsigned first_other_rank;
  unsigned first_full_expert;
  unsigned first_full_rank;
  std::int64_t num_rows_here;  ///< used rows of this rank
};

__device__ std::int64_t count_of(const NodeRouteParams& params, int run, int source) {
  return params.scratch.run_counts[static_cast<std::int64_t>(run) * params.num_ranks + source];
}

/// Places the runs of a rank, beginning with the first; returns the rank's number of rows.
__device__ std::int64_t place_runs_of(const NodeRouteParams& params, int rank, const std::int32_t* run_rows) {
  const int num_ranks = params.num_ranks;
  const auto enter = [&params, num_ranks](int run, std::int64_t first) {
    for (int source = 0; source < num_ranks; ++source) {
      params.scratch.run_first[static_cast<std::int64_t>(run) * num_ranks + source] = static_cast<std::int32_t>(first);
      first += count_of(params, run, source);
    }
  };
  if (params.by_token()) {
    enter(rank, 0);
    return run_rows[rank];
  }
  std::int64_t next = 0;
  const PlacementTables& placement = params.placement;
  for (int i = placement.first_of_rank[rank]; i < placement.first_of_rank[rank + 1]; ++i) {
    const int expert = placement.by_owner[i];
    enter(expert, next);
    if (rank == params.group_rank) params.tables.row_offsets[i - placement.first_of_rank[rank]] = next;
    next += params.layout == Layout::kSlab ? params.slab_capacity
                                           : plan::aligned_group_rows(run_rows[expert], params.expert_alignment);
  }
  if (rank == params.group_rank) params.tables.row_offsets[params.num_local_experts] = next;
  return next;
}

/// Records why the call is refused, for later kernels and the host. One thread calls it.
__device__ void refuse(const NodeRouteParams& params, const SumShared& shared, const std::int32_t* run_rows) {
  RouteSummary& summary = *params.tables.summary;
  summary.valid = 0;
  summary.fault_column = 0;
  if (shared.first_bad_rank != kNone) {
    const auto rank = static_cast<int>(shared.first_bad_rank);
    const IdsHeader& header = *RankIds(params, rank).header;
    report_bad_input(summary, {rank, header.bad_entry, header.bad_id}, params.num_topk, params.placement,
                     params.num_experts);
  } else if (shared.first_other_rank != kNone) {
    summary.fault = static_cast<std::int32_t>(Fault::kOtherHomes);
    summary.fault_rank = shared.first_other_rank;
    summary.fault_row = 0;
    summary.fault_value = 0;
    summary.fault_limit = 0;
  } else if (shared.first_full_expert != kNone) {
    const unsigned expert = shared.first_full_expert;
    summary.fault = static_cast<std::int32_t>(Fault::kSlabCapacity);
    summary.fault_rank = params.placement.owner[expert];
    summary.fault_row = expert;
    summary.fault_value = run_rows[expert];
    summary.fault_limit = params.slab_capacity;
  } else {
    const auto rank = static_cast<int>(shared.first_full_rank);
    summary.fault = static_cast<std::int32_t>(Fault::kRowCapacity);
    summary.fault_rank = rank;
    summary.fault_row = 0;
    summary.fault_value = place_runs_of(params, rank, run_rows);
    summary.fault_limit = RankIds(params, rank).header->max_recv_rows;
  }
  params.rails->gate.valid = 0;
  report_refused_route(params.ranks, summary);
}

/// Writes the counts of this rank for later kernels and the host. All threads of the block call it.
__device__ void write_counts(const NodeRouteParams& params) {
  const int num_ranks = params.num_ranks;
  const int me = params.group_rank;
  const NodeTables& tables = params.tables;
  const RouteResultTables& host = params.host;
  const bool tells = host.result != nullptr;
  const PlacementTables& placement = params.placement;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto run_of_local = [&placement, me](int local) {
    return placement.by_owner[placement.first_of_rank[me] + local];
  };
  for (int local = thread; local < params.num_local_experts; local += kThreads) {
    std::int32_t rows = 0;
    for (int source = 0; source < num_ranks; ++source) {
      const auto count =
          static_cast<std::int32_t>(params.by_token() ? params.scratch.expert_counts[local * num_ranks + source]
                                                      : count_of(params, run_of_local(local), source));
      rows += count;
    }
    tables.rows_per_expert[local] = rows;
    if (tells) host.rows_per_expert[local] = rows;
  }
  for (int local = thread; tells && !params.by_token() && local <= params.num_local_experts; local += kThreads) {
    host.row_offsets[local] = tables.row_offsets[local];
  }
  for (int rank = thread; rank < num_ranks; rank += kThreads) {
    std::int64_t from = 0;
    std::int64_t to = 0;
    if (params.by_token()) {
      from = count_of(params, me, rank);
      to = count_of(params, rank, me);
      for (int source = 0; source < num_ranks; ++source) {
        tables.rank_counts[source * num_ranks + rank] = static_cast<std::int32_t>(count_of(params, rank, source));
      }
      tables.source_base[rank] = params.scratch.run_first[me * num_ranks + rank];
      if (rank == num_ranks - 1) tables.source_base[num_ranks] = tables.source_base[rank] + static_cast<int>(from);
    } else {
      for (int local = 0; local < params.num_local_experts; ++local)
        from += count_of(params, run_of_local(local), rank);
      for (int i = placement.first_of_rank[rank]; i < placement.first_of_rank[rank + 1]; ++i) {
        to += count_of(params, placement.by_owner[i], me);
      }
    }
    tables.rank_base[rank] = 0;
    tables.tokens_of_rank[rank] = RankIds(params, rank).num_tokens(params);
    if (tells) {
      host.from_rank[rank] = from;
      host.to_rank[rank] = to;
    }
  }
  for (int node = thread; node < params.num_nodes(); node += kThreads) {
    const int peer = node * params.ranks_per_node + me % params.ranks_per_node;
    const auto first_out = static_cast<std::int32_t>(node * params.num_tokens);
    const auto first_in = static_cast<std::int32_t>(node * params.blocks.max_tokens);
    const std::int32_t num_out = params.scratch.items_out[node];
    const std::int32_t num_in = params.scratch.items_in[peer];
    tables.to_nodes[node] = {first_out, num_out, first_in, num_in};
    // Items that stay in the node are summed in place.
    tables.from_nodes[node] =
        node == params.node() ? ItemFlow{} : ItemFlow{first_in, num_in, first_back(params, node), num_out};
  }
}

/// Marks the route as refused because the ranks have not agreed: another kernel has informed the host, and no host
/// waits for counts any more. One thread calls it.
__device__ void tell_refused(const NodeRouteParams& params) {
  RouteSummary& summary = *params.tables.summary;
  summary.valid = 0;
  summary.fault = static_cast<std::int32_t>(Fault::kDisagreement);
  RouteResult* const result = params.host.result;
  if (result != nullptr) store_release_system(&result->state, RouteResult::kRefusedBySome);
}

__global__ void __launch_bounds__(kThreads, 1) sum_kernel(const __grid_constant__ NodeRouteParams params) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (is_broken(params.ranks)) return;
  if (!goes_on(params)) {
    if (thread == 0) tell_refused(params);
    return;
  }
  auto& shared = *reinterpret_cast<SumShared*>(dynamic_shared());
  auto* const run_rows = reinterpret_cast<std::int32_t*>(&shared + 1);
  if (thread == 0) shared = {kNone, kNone, kNone, kNone, 0};
  __syncthreads();
  for (int rank = thread; rank < params.num_ranks; rank += kThreads) {
    const IdsHeader& header = *RankIds(params, rank).header;
    if (header.bad_entry >= 0) atomicMin(&shared.first_bad_rank, static_cast<unsigned>(rank));
    if (header.homes_hash != RankIds(params, 0).header->homes_hash) {
      atomicMin(&shared.first_other_rank, static_cast<unsigned>(rank));
    }
  }
  for (int run = thread; run < params.num_runs(); run += kThreads) {
    std::int64_t rows = 0;
    for (int source = 0; source < params.num_ranks; ++source) rows += count_of(params, run, source);
    run_rows[run] = static_cast<std::int32_t>(rows);
    if (params.layout == Layout::kSlab && rows > params.slab_capacity) {
      atomicMin(&shared.first_full_expert, static_cast<unsigned>(run));
    }
  }
  __syncthreads();
  for (int rank = thread; rank < params.num_ranks; rank += kThreads) {
    const std::int64_t rows = place_runs_of(params, rank, run_rows);
    if (rank == params.group_rank) shared.num_rows_here = rows;
    if (rows > plan::row_limit(RankIds(params, rank).header->max_recv_rows)) {
      atomicMin(&shared.first_full_rank, static_cast<unsigned>(rank));
    }
  }
  __syncthreads();
  if ((shared.first_bad_rank & shared.first_other_rank & shared.first_full_expert & shared.first_full_rank) != kNone) {
    if (thread != 0) return;
    refuse(params, shared, run_rows);
    RouteResult* const result = params.host.result;
    if (result != nullptr) store_release_system(&result->state, RouteResult::kRefused);
    return;
  }
  write_counts(params);
  if (!params.by_token()) {
    for (int run = thread; run < params.num_runs(); run += kThreads) params.tables.expert_rows[run] = run_rows[run];
  }
  __syncthreads();
  add_to_counters(
      params.counters, params.placement, params.num_experts, params.num_local_experts,
      [&params](int expert) {
        return params.by_token() ? params.scratch.own_counts[expert]
                                 : static_cast<std::int32_t>(count_of(params, expert, params.group_rank));
      },
      [&params](int local) { return params.tables.rows_per_expert[local]; },
      [&params] { return static_cast<std::int32_t>(RankIds(params, params.group_rank).header->num_homeless); });
  if (thread != 0) return;
  RouteSummary& summary = *params.tables.summary;
  summary.num_used_rows = static_cast<std::int32_t>(shared.num_rows_here);
  summary.valid = 1;
  if (params.host.result == nullptr) return;
  params.host.result->num_used_rows = shared.num_rows_here;
  params.host.result->repeats = 1;  // repeats are not detected here
  fence_system();
  store_release_system(&params.host.result->state, 1);
}

/// One entry of a token, held by the lane with its index.
struct Entry {
  int expert = -1;  ///< -1: no expert
  int rank = -1;
  std::int32_t row = -1;
  std::int32_t position = 0;  ///< position in its run among its source's rows
};

/// Writes the destinations of the `wanted` entries, ascending by (rank, row, topk), to the first of K places. One warp
/// calls it. `first_rank`: rank that is number 0 in the destinations.
__device__ void write_destinations(const Entry& entry, bool wanted, int first_rank, Destination* places) {
  const auto key = [](int rank, std::int32_t row) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(rank)) << 32 | static_cast<std::uint32_t>(row);
  };
  const std::uint64_t mine = key(entry.rank, entry.row);
  const unsigned all = __ballot_sync(kAllLanes, static_cast<int>(wanted));
  int place = 0;
  bool first_of_row = true;
  bool first_of_rank = true;
  for (unsigned left = all; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const std::uint64_t other = __shfl_sync(kAllLanes, mine, lane);
    const bool before = other < mine || (other == mine && lane < lane_idx());
    if (!before) continue;
    ++place;
    first_of_row = first_of_row && other != mine;
    first_of_rank = first_of_rank && other >> 32 != mine >> 32;
  }
  if (!wanted) return;
  Destination destination{};
  destination.row = entry.row;
  destination.token_row = entry.position;
  destination.rank = static_cast<std::int16_t>(entry.rank - first_rank);
  destination.topk = static_cast<std::uint8_t>(lane_idx());
  destination.flags = static_cast<std::uint8_t>((first_of_row ? kFirstOfRow : 0) | (first_of_rank ? kFirstOfRank : 0));
  places[place] = destination;
}

/// Fills the tables for one token of the group. One warp calls it.
__device__ void fill_token(const NodeRouteParams& params, int rank, std::int64_t token, const RankIds& source) {
  const int lane = lane_idx();
  const std::int64_t at = rank * params.blocks.max_tokens + token;
  const NodeTables& tables = params.tables;
  Entry entry;
  if (lane < params.num_topk) entry.expert = source.expert(params, token, lane);
  if (entry.expert >= 0) {
    entry.rank = params.placement.owner[entry.expert];
    entry.position = params.scratch.positions[at * params.num_topk + lane];
    entry.row =
        entry.position +
        params.scratch.run_first[static_cast<std::int64_t>(run_of(params, entry.expert)) * params.num_ranks + rank];
  }
  const std::int32_t item = params.scratch.node_items[at];
  if (entry.rank == params.group_rank) {
    tables.source[2 * std::int64_t{entry.row}] = rank;
    tables.source[2 * std::int64_t{entry.row} + 1] = static_cast<std::int32_t>(token);
    const auto first = static_cast<std::int32_t>(rank / params.ranks_per_node * params.blocks.max_tokens);
    tables.row_items[entry.row] = {rank % params.ranks_per_node, first + item};
    if (!params.by_token()) tables.row_experts[entry.row] = entry.expert;
  }
  if (rank % params.ranks_per_node == params.group_rank % params.ranks_per_node && item >= 0) {
    const int first_rank = params.node() * params.ranks_per_node;
    const bool here = entry.rank >= first_rank && entry.rank < first_rank + params.ranks_per_node;
    const std::int64_t place = rank / params.ranks_per_node * params.blocks.max_tokens + item;
    write_destinations(entry, here, first_rank, tables.destinations + place * params.num_topk);
  }
  if (rank != params.group_rank) return;
  if (lane < params.num_topk) tables.slots[token * params.num_topk + lane] = entry.row;
  write_destinations(entry, entry.rank >= 0, 0, tables.token_destinations + token * params.num_topk);
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ NodeRouteParams params) {
  if (!goes_on(params)) return;
  constexpr int kWarps = kThreads / kWarpLanes;
  const int num_warps = static_cast<int>(gridDim.x) * kWarps;
  const std::int64_t max_tokens = params.blocks.max_tokens;
  for (std::int64_t i = static_cast<int>(blockIdx.x) * kWarps + warp_idx(); i < params.num_ranks * max_tokens;
       i += num_warps) {
    const auto rank = static_cast<int>(i / max_tokens);
    const RankIds source(params, rank);
    if (i % max_tokens < source.num_tokens(params)) fill_token(params, rank, i % max_tokens, source);
  }
}

}  // namespace

cudaError_t launch_node_route(const NodeRouteParams& params, cudaStream_t stream) {
  const auto num_blocks = static_cast<unsigned>(params.num_blocks);
  const std::size_t shared_bytes =
      sizeof(SumShared) + static_cast<std::size_t>(params.num_runs()) * sizeof(std::int32_t);
  const unsigned num_counting = std::min(num_blocks, static_cast<unsigned>(params.num_ranks));
  const std::size_t count_bytes = static_cast<std::size_t>(CountTables::of(params).num_words()) * sizeof(std::int32_t);
  cudaError_t error = launch_kernel(clear_kernel, {num_blocks, kThreads, 0}, params, stream);
  if (error == cudaSuccess) error = launch_kernel(count_kernel, {num_counting, kThreads, count_bytes}, params, stream);
  if (error == cudaSuccess) error = launch_kernel(sum_kernel, {1, kThreads, shared_bytes}, params, stream);
  if (error == cudaSuccess) error = launch_kernel(fill_kernel, {num_blocks, kThreads, 0}, params, stream);
  return error;
}

cudaError_t load_node_route_kernels() {
  cudaFuncAttributes attributes;
  for (const auto* kernel : {reinterpret_cast<const void*>(clear_kernel), reinterpret_cast<const void*>(count_kernel),
                             reinterpret_cast<const void*>(sum_kernel), reinterpret_cast<const void*>(fill_kernel)}) {
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace ferry::cuda
