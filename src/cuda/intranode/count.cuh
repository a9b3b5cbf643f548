#ifndef FERRY_CUDA_INTRANODE_COUNT_CUH
#define FERRY_CUDA_INTRANODE_COUNT_CUH

/// Counts the distinct ranks and the distinct experts of each block's tokens. The last block to finish adds up the
/// counts of all blocks.

#include <cstdint>

#include "cuda/intranode/entries.cuh"
#include "cuda/intranode/exchange_scratch.cuh"

namespace ferry::cuda::device {

/// Rows of counts that a thread loads together, to overlap their latencies. For T = 4096 they are all of a thread's
/// rows.
inline constexpr int kSumBatch = 6;

__device__ inline int4 add_quads(const int4& a, const int4& b) {
  return make_int4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/// Values that a thread needs first in order to count. They are loaded together with the values that start the call,
/// since each load may go to memory.
struct FirstLoads {
  LoadedId id;                 ///< lane's id in the block's first part
  std::int32_t owner;          ///< owner of the expert with the thread's number, if the placement is near
  std::int32_t by_owner;       ///< entry of by_owner with the thread's number, if the placement is near
  std::int32_t first_of_rank;  ///< first expert of the rank with the thread's number
};

/// Token range of a warp within one part of the tokens, and the step between its tokens.
struct PartTokens {
  std::int64_t first;  ///< of this warp
  std::int64_t end;
  int per_warp;

  __device__ PartTokens(const RouteParams& params, int block)
      : per_warp(TokenLanes(params.num_topk).tokens_per_warp()) {
    const std::int64_t begin = static_cast<std::int64_t>(block) * params.tokens_per_block;
    const std::int64_t behind = begin + params.tokens_per_block;
    first = begin + warp_idx() * per_warp;
    end = behind < params.num_tokens ? behind : params.num_tokens;
  }
};

__device__ inline LoadedId load_first_id(const RouteParams& params, int block) {
  if (block >= params.num_blocks) return {};
  const PartTokens tokens(params, block);
  return load_lane_id(params, tokens.first, tokens.end);
}

__device__ inline FirstLoads load_first(const RouteParams& params) {
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_owner = params.num_experts <= kNearExperts && thread < params.num_experts;
  return {load_first_id(params, static_cast<int>(blockIdx.x)), has_owner ? params.placement.owner[thread] : 0,
          has_owner ? params.placement.by_owner[thread] : 0,
          thread <= params.ranks.num_ranks ? params.placement.first_of_rank[thread] : 0};
}

/// Copies the tables of homes. All threads call it; a barrier follows. Not inlined, for the same reason as pick_home.
__device__ __noinline__ inline void load_near_homes(const HomeTables& from, int num_experts, plan::HomeRange* ranges,
                                                    std::int32_t* homes) {
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = thread; i < num_experts; i += kExchangeThreads) homes[i] = from.homes[i];
#pragma unroll 1
  for (int i = thread; i < from.num_logical; i += kExchangeThreads) ranges[i] = from.ranges[i];
}

/// Copies the placement's tables to shared memory and returns the tables that counting must read. All threads call it;
/// a barrier follows.
__device__ inline PlacementTables load_near_placement(const RouteParams& params, const FirstLoads& loads,
                                                      const Scratch& scratch) {
  PlacementTables near = params.placement;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread <= params.ranks.num_ranks) scratch.first_of_rank[thread] = loads.first_of_rank;
  if (params.num_experts > kNearExperts) return near;
#pragma unroll 1
  for (int i = thread; i < params.num_experts; i += kExchangeThreads) {
    scratch.owner[i] = i == thread ? loads.owner : near.owner[i];
    scratch.by_owner[i] = i == thread ? loads.by_owner : near.by_owner[i];
  }
  near.owner = scratch.owner;
  if (near.homes.ranges != nullptr && near.homes.num_logical <= kNearExperts) {
    load_near_homes(params.placement.homes, params.num_experts, scratch.ranges, scratch.homes);
    near.homes.ranges = scratch.ranges;
    near.homes.homes = scratch.homes;
  }
  return near;
}

/// Counts the tokens of one part, whose first ids are already loaded. All threads of a block call it.
__device__ inline void count_part(const RouteParams& params, const PlacementTables& placement, int block,
                                  LoadedId loaded, const Scratch& scratch, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto columns = plan::CountColumns::of(params.ranks.num_ranks, params.num_experts);
  auto* counts = reinterpret_cast<std::int32_t*>(scratch.totals);
#pragma unroll 1
  for (int column = thread; column < columns.size; column += kExchangeThreads) counts[column] = 0;
  if (thread == 0) {
    shared.bad_entry = kNoEntry;
    shared.repeats = 0;
    shared.num_homeless = 0;
  }
  __syncthreads();
  const PartTokens tokens(params, block);
  const int step = tokens.per_warp * kExchangeWarps;
#pragma unroll 1
  for (std::int64_t token = tokens.first; token < tokens.end; token += step) {
    const Entry entry = entry_of(params, placement, loaded);
    loaded = load_lane_id(params, token + step, tokens.end);
    if (entry.first_of_rank) atomicAdd(&counts[entry.owner], 1);
    if (entry.first_of_expert) atomicAdd(&counts[columns.first_expert + entry.expert], 1);
    if (entry.expert >= 0 && !entry.first_of_expert) shared.repeats = 1;  // all threads write the same value
    if (entry.homeless) atomicAdd(&shared.num_homeless, 1U);
    if (entry.bad) {
      atomicMin(&shared.bad_entry, static_cast<unsigned long long>(entry.token * params.num_topk + entry.topk));
    }
  }
  __syncthreads();
  int4* const rows = reinterpret_cast<int4*>(params.tables.block_counts);
#pragma unroll 1
  for (int quad = thread; quad < columns.num_quads(); quad += kExchangeThreads) {
    rows[static_cast<std::int64_t>(block) * columns.num_quads() + quad] = scratch.totals[quad];
  }
  if (thread == 0) params.tables.block_marks[block] = {shared.bad_entry, shared.repeats, shared.num_homeless};
  __syncthreads();
}

/// Counts this block's parts of the tokens. Returns true in exactly one block: the one that finds the counts of all
/// parts in memory.
__device__ inline bool count_tokens(const RouteParams& params, const FirstLoads& loads, const Scratch& scratch,
                                    Shared& shared) {
  const PlacementTables placement = load_near_placement(params, loads, scratch);
  LoadedId loaded = loads.id;
#pragma unroll 1
  for (int block = static_cast<int>(blockIdx.x); block < params.num_blocks; block += static_cast<int>(gridDim.x)) {
    const LoadedId next = load_first_id(params, block + static_cast<int>(gridDim.x));
    count_part(params, placement, block, loaded, scratch, shared);
    loaded = next;
  }
  if (threadIdx.x == 0) {
    LocalState& local = *params.ranks.control.local;
    shared.is_last = add_acq_rel_device(&local.num_blocks_done, 1) + 1 == gridDim.x;
    if (shared.is_last) local.num_blocks_done = 0;
    shared.num_homeless = 0;  // sum_blocks() adds those of all blocks
  }
  __syncthreads();
  return shared.is_last;
}

/// Calls use(row, address of the row's quad, quad of counts) for the rows of one part, loading several at a time.
template <typename Use>
__device__ inline void for_each_row(const RouteParams& params, const plan::SumShares& shares, int part, int quad,
                                    Use use) {
  const int end = shares.end_row(part, params.num_blocks);
  int row = shares.first_row(part);
  int4* at =
      reinterpret_cast<int4*>(params.tables.block_counts) + static_cast<std::int64_t>(row) * shares.num_quads + quad;
#pragma unroll 1
  for (; row < end; row += kSumBatch) {
    int4 batch[kSumBatch];
    const int4* next = at;
#pragma unroll
    for (int i = 0; i < kSumBatch; ++i) {
      // Loads from the L2 cache, which holds the stores of other blocks.
      batch[i] = row + i < end ? __ldcg(next) : make_int4(0, 0, 0, 0);
      next += shares.num_quads;
    }
#pragma unroll
    for (int i = 0; i < kSumBatch; ++i) {
      if (row + i < end) use(row + i, at, batch[i]);
      at += shares.num_quads;
    }
  }
}

/// Adds up the blocks' counts and marks. Results: `totals`, and in `part_sums` the counts before each part of the
/// blocks.
__device__ inline void sum_blocks(const RouteParams& params, const Scratch& scratch, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto columns = plan::CountColumns::of(params.ranks.num_ranks, params.num_experts);
  const auto shares = plan::SumShares::of(columns, params.num_blocks, kExchangeThreads);
  // Threads take blocks in reverse order: with few columns, the last threads have no share of the sums.
#pragma unroll 1
  for (int block = kExchangeThreads - 1 - thread; block < params.num_blocks; block += kExchangeThreads) {
    const int4 marks = __ldcg(reinterpret_cast<const int4*>(&params.tables.block_marks[block]));
    const auto bad_entry = static_cast<unsigned long long>(static_cast<std::uint32_t>(marks.y)) << 32 |
                           static_cast<std::uint32_t>(marks.x);
    if (bad_entry != kNoEntry) atomicMin(&shared.bad_entry, bad_entry);
    if (marks.z != 0) shared.repeats = 1;
    if (marks.w != 0) atomicAdd(&shared.num_homeless, static_cast<std::uint32_t>(marks.w));
  }
#pragma unroll 1
  for (int item = thread; item < shares.num_items(); item += kExchangeThreads) {
    const int part = item / shares.num_quads;
    int4 sum = make_int4(0, 0, 0, 0);
    for_each_row(params, shares, part, item - part * shares.num_quads,
                 [&sum](int, int4*, const int4& counts) { sum = add_quads(sum, counts); });
    scratch.part_sums[item] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int quad = thread; quad < shares.num_quads; quad += kExchangeThreads) {
    int4 before = make_int4(0, 0, 0, 0);
#pragma unroll 4
    for (int part = 0; part < shares.num_parts; ++part) {
      int4& part_sum = scratch.part_sums[part * shares.num_quads + quad];
      const int4 sum = part_sum;
      part_sum = before;
      before = add_quads(before, sum);
    }
    scratch.totals[quad] = before;
  }
  __syncthreads();
}

/// Turns each block's counts into the counts of the blocks before it. Called after sum_blocks.
__device__ inline void write_counts_before(const RouteParams& params, const Scratch& scratch) {
  const int num_ranks = params.ranks.num_ranks;
  const auto columns = plan::CountColumns::of(num_ranks, params.num_experts);
  const auto shares = plan::SumShares::of(columns, params.num_blocks, kExchangeThreads);
  const auto write_ranks = [&params, num_ranks](int block, int quad, const int4& counts) {
    if (quad * plan::kQuad >= num_ranks) return;
    const std::int32_t of_ranks[plan::kQuad] = {counts.x, counts.y, counts.z, counts.w};
#pragma unroll
    for (int i = 0; i < plan::kQuad; ++i) {
      const int rank = quad * plan::kQuad + i;
      if (rank < num_ranks) params.tables.block_ranks[block * num_ranks + rank] = of_ranks[i];
    }
  };
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < shares.num_items(); item += kExchangeThreads) {
    const int part = item / shares.num_quads;
    const int quad = item - part * shares.num_quads;
    int4 before = scratch.part_sums[item];
    for_each_row(params, shares, part, quad, [&](int block, int4* at, const int4& counts) {
      *at = before;
      write_ranks(block, quad, before);
      before = add_quads(before, counts);
    });
    if (part == shares.num_parts - 1) write_ranks(params.num_blocks, quad, before);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_COUNT_CUH
