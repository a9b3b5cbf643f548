#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_GROUPS_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_GROUPS_CUH

/// Derives where rows begin from the counts of all ranks. Each count is loaded once, and all loads of a thread are in
/// flight together. The tables are correct if every rank's rows are found to be within row_limit; sums have 64 bits.
/// The host gets its copies at once and reads them only if the route is valid.

#include <cstdint>

#include "cuda/intranode/exchange_counts.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda::device {

/// Copies the rest of the placement to shared memory and clears the sums. All threads of the exchanging block call it;
/// a barrier follows.
__device__ inline void prepare_groups(const RouteParams& params, const Scratch& scratch, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  if (params.num_experts > kNearExperts) {
#pragma unroll 1
    for (int i = thread; i < params.num_experts; i += kExchangeThreads) {
      scratch.by_owner[i] = params.placement.by_owner[i];
      scratch.owner[i] = params.placement.owner[i];
    }
  }
  if (thread < params.ranks.num_ranks) {
    scratch.rank_rows[thread] = 0;
    scratch.from_rank[thread] = 0;
    scratch.to_rank[thread] = 0;
  }
  if (thread == 0) {
    shared.first_full_expert = kNoExpert;
    shared.carry = 0;
  }
}

/// Inclusive sum over the lanes of a warp.
__device__ inline std::int64_t scan_warp(std::int64_t value) {
#pragma unroll 1
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const std::int64_t below = __shfl_up_sync(kAllLanes, value, static_cast<unsigned>(distance));
    if (lane_idx() >= distance) value += below;
  }
  return value;
}

/// Inclusive sum over the block's threads, in thread order.
__device__ inline std::int64_t scan_block(Shared& shared, std::int64_t value) {
  const std::int64_t sum = scan_warp(value);
  if (lane_idx() == kWarpLanes - 1) shared.warp_sums[warp_idx()] = sum;
  __syncthreads();
  if (warp_idx() == 0) shared.warp_sums[lane_idx()] = scan_warp(shared.warp_sums[lane_idx()]);
  __syncthreads();
  const std::int64_t result = sum + (warp_idx() > 0 ? shared.warp_sums[warp_idx() - 1] : 0);
  __syncthreads();
  return result;
}
static_assert(kExchangeWarps == kWarpLanes, "one warp scans the sums of all warps");

/// Sum over the lanes of a warp of nonnegative counts. It may exceed 32 bits.
__device__ inline std::int64_t sum_lanes(std::int32_t count) {
  constexpr int kHalfBits = 16;
  const std::uint32_t low = __reduce_add_sync(kAllLanes, static_cast<std::uint32_t>(count) & 0xFFFFU);
  const std::uint32_t high = __reduce_add_sync(kAllLanes, static_cast<std::uint32_t>(count) >> kHalfBits);
  return static_cast<std::int64_t>(high) * (std::int64_t{1} << kHalfBits) + low;
}

/// Counts the token rows of each (source, rank) pair; in the layout where these are the rows, also passes them to the
/// host. All threads call it: one warp per rank, one lane per source.
__device__ inline void place_token_rows(const RouteParams& params, const Posted& posted, const Scratch& scratch,
                                        Shared& shared) {
  const int num_ranks = params.ranks.num_ranks;
  const int me = params.ranks.rank;
  const bool by_token = params.layout == Layout::kTokens;
  // Ranks start at the last warps, because the first warps have experts.
#pragma unroll 1
  for (int rank = kExchangeWarps - 1 - warp_idx(); rank < num_ranks; rank += kExchangeWarps) {
    std::int64_t before_me = 0;
    std::int64_t rows = 0;
#pragma unroll 1
    for (int first = 0; first < num_ranks; first += kWarpLanes) {
      const int source = first + lane_idx();
      const bool exists = source < num_ranks;
      const std::int32_t count = exists ? posted.count(source, rank) : 0;
      if (exists) params.tables.rank_counts[source * num_ranks + rank] = count;
      if (by_token && source == me) tell_host(params, params.host_words.to_rank() + rank, count);
      before_me += sum_lanes(source < me ? count : 0);
      if (rank == me) {
        if (by_token && exists) tell_host(params, params.host_words.from_rank() + source, count);
        const std::int64_t end = rows + scan_warp(count);
        if (exists) params.tables.source_base[source + 1] = static_cast<std::int32_t>(end);
      }
      rows += sum_lanes(count);
    }
    if (lane_idx() != 0) continue;
    if (rank == me) {
      params.tables.source_base[0] = 0;
      shared.num_token_rows = static_cast<std::int32_t>(rows);
    }
    params.tables.rank_base[rank] = static_cast<std::int32_t>(before_me);
    if (by_token) scratch.rank_rows[rank] = rows;
  }
}

__device__ inline void store_rows_of_expert(const RouteParams& params, int local_expert, std::int64_t rows) {
  params.tables.rows_per_expert[local_expert] = static_cast<std::int32_t>(rows);
  tell_host(params, params.host_words.rows_per_expert() + local_expert, rows);
}

/// Layout kTokens: counts the rows of all experts; this rank's go into the Routing. All threads call it.
__device__ inline void count_expert_rows(const RouteParams& params, const Posted& posted, const Scratch& scratch) {
  const int first_local = scratch.first_of_rank[params.ranks.rank];
  const int end_local = scratch.first_of_rank[params.ranks.rank + 1];
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x); at < params.num_experts; at += kExchangeThreads) {
    const int expert = scratch.by_owner[at];
    std::int64_t rows = 0;
    posted.for_each_source(posted.first_expert + expert, true, [&rows](int, std::int32_t count) { rows += count; });
    params.tables.expert_rows[expert] = rows;
    if (at >= first_local && at < end_local) store_rows_of_expert(params, at - first_local, rows);
  }
}

/// Layouts grouped by expert: rows that each expert's group takes, and where the group begins. All threads call it.
__device__ inline void place_groups(const RouteParams& params, const Posted& posted, const Scratch& scratch,
                                    Shared& shared) {
  const int me = params.ranks.rank;
  const int thread = static_cast<int>(threadIdx.x);
  const bool slab = params.layout == Layout::kSlab;
#pragma unroll 1
  for (int first = 0; first < params.num_experts; first += kExchangeThreads) {
    const int at = first + thread;
    const bool exists = at < params.num_experts;
    const int expert = exists ? scratch.by_owner[at] : 0;
    const int owner = exists ? scratch.owner[expert] : -1;
    std::int64_t rows = 0;
    std::int64_t before_me = 0;
    std::int32_t mine = 0;
    posted.for_each_source(posted.first_expert + expert, exists, [&](int source, std::int32_t count) {
      if (source < me) before_me += count;
      if (source == me) mine = count;
      rows += count;
      const int from = __reduce_add_sync(0xFFFFFFFFU, owner == me ? count : 0);
      if (lane_idx() == 0 && from != 0) atomicAdd(&scratch.from_rank[source], from);
    });
    if (mine != 0) atomicAdd(&scratch.to_rank[owner], mine);
    if (slab && rows > params.slab_capacity) {
      atomicMin(&shared.first_full_expert, static_cast<unsigned long long>(expert));
    }
    if (exists) params.tables.expert_rows[expert] = rows;
    if (owner == me) store_rows_of_expert(params, at - scratch.first_of_rank[me], rows);
    std::int64_t group_rows = 0;
    if (exists) group_rows = slab ? params.slab_capacity : plan::aligned_group_rows(rows, params.expert_alignment);
    const std::int64_t end = scan_block(shared, group_rows) + shared.carry;
    if (exists) {
      scratch.group_first[at] = end - group_rows;
      scratch.rows_before[at] = static_cast<std::int32_t>(before_me);
      if (at == params.num_experts - 1) scratch.group_first[params.num_experts] = end;
    }
    __syncthreads();
    if (thread == kExchangeThreads - 1) shared.carry = end;
    __syncthreads();
  }
  const auto store_offset = [&params](int local_expert, std::int64_t row) {
    params.tables.row_offsets[local_expert] = row;
    tell_host(params, params.host_words.row_offsets() + local_expert, row);
  };
  const std::int32_t* const first_of_rank = scratch.first_of_rank;
#pragma unroll 1
  for (int at = thread; at < params.num_experts; at += kExchangeThreads) {
    const int expert = scratch.by_owner[at];
    const int owner = scratch.owner[expert];
    const std::int64_t row = scratch.group_first[at] - scratch.group_first[first_of_rank[owner]];
    params.tables.expert_base[expert] = static_cast<std::int32_t>(scratch.rows_before[at] + row);
    if (owner == me) store_offset(at - first_of_rank[me], row);
  }
#pragma unroll 1
  for (int rank = thread; rank < params.ranks.num_ranks; rank += kExchangeThreads) {
    const std::int64_t rows = scratch.group_first[first_of_rank[rank + 1]] - scratch.group_first[first_of_rank[rank]];
    scratch.rank_rows[rank] = rows;
    if (rank == me) store_offset(params.num_local_experts, rows);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_GROUPS_CUH
