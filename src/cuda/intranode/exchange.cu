/// Second step of route: one block adds up the counts, posts them to every rank, waits for theirs, and derives where
/// this rank's rows begin everywhere. The host waits for nothing else.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/exchange_counts.cuh"
#include "cuda/intranode/exchange_report.cuh"
#include "cuda/sync/entry.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr std::int64_t kNoFault = INT64_MAX;

/// Scratch of the block.
struct Shared {
  Outcome outcome;
  bool repeats;
  unsigned long long first_fault;  // index of the expert or rank at fault, lowest first
  std::int64_t warp_sums[kExchangeThreads / kWarpLanes];
  std::int64_t carry;
};

/// Shared memory whose size depends on the call.
struct Scratch {
  std::int64_t* group_first;      ///< [E] first row of each group, counted over all ranks
  unsigned long long* rank_rows;  ///< [R] rows of each rank
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Scratch at(std::byte* base, const RouteParams& params) {
    plan::Carver carver(base);
    Scratch scratch{};
    scratch.group_first = carver.take<std::int64_t>(static_cast<std::size_t>(params.num_experts));
    scratch.rank_rows = carver.take<unsigned long long>(static_cast<std::size_t>(params.ranks.num_ranks));
    scratch.size_bytes = carver.used_bytes();
    return scratch;
  }
};

/// Inclusive sum over the block's threads, in thread order.
__device__ std::int64_t scan_block(Shared& shared, std::int64_t value) {
  std::int64_t sum = value;
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const std::int64_t below = __shfl_up_sync(0xFFFFFFFFU, sum, static_cast<unsigned>(distance));
    if (lane_idx() >= distance) sum += below;
  }
  if (lane_idx() == kWarpLanes - 1) shared.warp_sums[warp_idx()] = sum;
  __syncthreads();
  if (warp_idx() == 0) {
    std::int64_t warp_sum = shared.warp_sums[lane_idx()];
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::int64_t below = __shfl_up_sync(0xFFFFFFFFU, warp_sum, static_cast<unsigned>(distance));
      if (lane_idx() >= distance) warp_sum += below;
    }
    shared.warp_sums[lane_idx()] = warp_sum;
  }
  __syncthreads();
  const std::int64_t result = sum + (warp_idx() > 0 ? shared.warp_sums[warp_idx() - 1] : 0);
  __syncthreads();
  return result;
}

/// Rows that each expert's group takes and where it begins, in `group_first` [E] and `rank_rows` [R] (shared memory).
/// Sums are of 64 bits. What goes into the tables is right once every rank's rows are found to be within row_limit.
__device__ void place_groups(const RouteParams& params, const Posted& posted, Shared& shared, std::int64_t* group_first,
                             unsigned long long* rank_rows) {
  const int num_ranks = params.ranks.num_ranks;
  for (int first = 0; first < params.num_experts; first += kExchangeThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    const int expert = at < params.num_experts ? params.placement.by_owner[at] : -1;
    std::int64_t rows = 0;
    std::int64_t before_me = 0;
    if (expert >= 0) {
      for (int source = 0; source < num_ranks; ++source) {
        const std::int32_t count = posted.count(source, num_ranks + expert);
        if (source < params.ranks.rank) before_me += count;
        rows += count;
      }
      if (params.layout == Layout::kSlab && rows > params.slab_capacity) {
        atomicMin(&shared.first_fault, static_cast<unsigned long long>(expert));
      }
      if (params.placement.owner[expert] == params.ranks.rank) {
        params.tables.rows_per_expert[params.placement.local_expert[expert]] = static_cast<std::int32_t>(rows);
      }
    }
    const std::int64_t group_rows =
        params.layout == Layout::kSlab ? params.slab_capacity : plan::aligned_group_rows(rows, params.expert_alignment);
    const std::int64_t end = scan_block(shared, expert >= 0 ? group_rows : 0) + shared.carry;
    if (expert >= 0) {
      atomicAdd(&rank_rows[params.placement.owner[expert]], static_cast<unsigned long long>(group_rows));
      group_first[at] = end - group_rows;
      params.tables.expert_base[expert] = static_cast<std::int32_t>(before_me);
    }
    __syncthreads();
    if (threadIdx.x == kExchangeThreads - 1) shared.carry = end;
    __syncthreads();
  }
  const std::int32_t* first_of_rank = params.placement.first_of_rank;
  for (int at = static_cast<int>(threadIdx.x); at < params.num_experts; at += kExchangeThreads) {
    const int expert = params.placement.by_owner[at];
    const int owner = params.placement.owner[expert];
    const std::int64_t first = group_first[at] - group_first[first_of_rank[owner]];
    params.tables.expert_base[expert] = static_cast<std::int32_t>(params.tables.expert_base[expert] + first);
    if (owner == params.ranks.rank) params.tables.row_offsets[params.placement.local_expert[expert]] = first;
  }
  if (threadIdx.x == 0)
    params.tables.row_offsets[params.num_local_experts] = static_cast<std::int64_t>(rank_rows[params.ranks.rank]);
}

/// Token rows of each (source, rank) pair; `rank_rows` too where those are the rows.
__device__ void place_token_rows(const RouteParams& params, const Posted& posted, unsigned long long* rank_rows) {
  const int num_ranks = params.ranks.num_ranks;
  for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += kExchangeThreads) {
    std::int64_t before_me = 0;
    std::int64_t rows = 0;
    for (int source = 0; source < num_ranks; ++source) {
      const std::int32_t count = posted.count(source, rank);
      if (source < params.ranks.rank) before_me += count;
      rows += count;
      params.tables.rank_counts[source * num_ranks + rank] = count;
    }
    params.tables.tokens_of_rank[rank] = posted.header(rank).num_tokens;
    params.tables.rank_base[rank] = static_cast<std::int32_t>(before_me);
    if (params.layout == Layout::kTokens) rank_rows[rank] = static_cast<unsigned long long>(rows);
  }
  if (threadIdx.x == 0) {
    std::int64_t base = 0;
    for (int source = 0; source < num_ranks; ++source) {
      params.tables.source_base[source] = static_cast<std::int32_t>(base);
      base += posted.count(source, params.ranks.rank);
    }
    params.tables.source_base[num_ranks] = static_cast<std::int32_t>(base);
  }
}

__global__ void __launch_bounds__(kExchangeThreads) exchange_kernel(const __grid_constant__ RouteParams params) {
  extern __shared__ __align__(64) std::byte memory[];
  __shared__ Shared shared;
  const RankParams& ranks = params.ranks;
  if (is_broken(ranks)) return;
  const std::uint64_t epoch = current_epoch(ranks);
  publish_counts(params, epoch);
  const Posted posted(ranks, epoch);
  if (warp_idx() == 0) {
    // A rank that dispatches or combines instead posts an entry.
    const bool here = wait_all_ranks(ranks, Awaited::kCounts, count_flags(ranks), epoch, entry_flags(ranks, epoch));
    bool equal = true;
    bool good = true;
    bool repeats = false;
    for (int rank = lane_idx(); here && rank < ranks.num_ranks; rank += kWarpLanes) {
      const std::uint64_t theirs = posted.header(rank).agreement;
      equal = equal && count_flags(ranks).load(rank) >= epoch && theirs == params.agreement && theirs != 0;
      good = good && posted.header(rank).bad_entry < 0;
      repeats = repeats || posted.header(rank).repeats != 0;
    }
    const bool all_equal = __all_sync(0xFFFFFFFFU, equal) != 0;
    const bool all_good = __all_sync(0xFFFFFFFFU, good) != 0;
    const bool any_repeats = __any_sync(0xFFFFFFFFU, repeats) != 0;
    if (lane_idx() == 0) {
      shared.outcome = !here ? Outcome::kStop : all_equal && all_good ? Outcome::kGo : Outcome::kSkip;
      shared.repeats = any_repeats;
      shared.first_fault = kNoFault;
      shared.carry = 0;
      if (here && !(all_equal && all_good)) {
        int bad_rank = 0;
        while (all_equal && posted.header(bad_rank).bad_entry < 0) ++bad_rank;
        if (params.agreement != 0) {
          report_fault(params, posted, epoch, all_equal ? Fault::kBadId : Fault::kDisagreement, bad_rank, nullptr);
        }
      }
    }
  }
  __syncthreads();
  if (shared.outcome == Outcome::kStop) return;
  if (shared.outcome == Outcome::kSkip) {
    if (params.agreement != 0) report_result(params, false, false);
    // Ranks that made another call wait for `done`.
    if (warp_idx() == 0) {
      post_done(ranks, epoch);
      finish_call(ranks, epoch);
    }
    return;
  }
  const Scratch scratch = Scratch::at(memory, params);
  std::int64_t* group_first = scratch.group_first;
  unsigned long long* rank_rows = scratch.rank_rows;
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks; rank += kExchangeThreads) rank_rows[rank] = 0;
  __syncthreads();
  place_token_rows(params, posted, rank_rows);
  if (params.layout == Layout::kTokens) {
    for (int expert = static_cast<int>(threadIdx.x); expert < params.num_experts; expert += kExchangeThreads) {
      if (params.placement.owner[expert] != ranks.rank) continue;
      std::int64_t rows = 0;
      for (int source = 0; source < ranks.num_ranks; ++source) rows += posted.count(source, ranks.num_ranks + expert);
      params.tables.rows_per_expert[params.placement.local_expert[expert]] = static_cast<std::int32_t>(rows);
    }
  } else {
    place_groups(params, posted, shared, group_first, rank_rows);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    RouteSummary& summary = *params.tables.summary;
    summary.valid = 1;
    summary.num_used_rows = static_cast<std::int32_t>(rank_rows[ranks.rank]);
    summary.num_token_rows = params.tables.source_base[ranks.num_ranks];
    if (shared.first_fault != kNoFault) {
      report_fault(params, posted, epoch, Fault::kSlabCapacity, static_cast<std::int64_t>(shared.first_fault),
                   rank_rows);
    }
    for (int rank = 0; summary.valid != 0 && rank < ranks.num_ranks; ++rank) {
      const std::int64_t limit = plan::row_limit(posted.header(rank).max_recv_rows);
      if (rank_rows[rank] > static_cast<unsigned long long>(limit))
        report_fault(params, posted, epoch, Fault::kRowCapacity, rank, rank_rows);
    }
  }
  __syncthreads();
  const bool valid = params.tables.summary->valid != 0;
  if (valid && params.layout != Layout::kTokens) report_expert_rows(params, posted);
  report_result(params, valid, shared.repeats);
  if (threadIdx.x == 0) end_epoch(ranks, epoch);
}

}  // namespace

cudaError_t launch_exchange(const RouteParams& params, cudaStream_t stream) {
  const std::size_t shared_bytes = Scratch::at(nullptr, params).size_bytes;
  return launch_kernel(exchange_kernel, {1, kExchangeThreads, shared_bytes}, params, stream);
}

cudaError_t load_exchange_kernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, exchange_kernel);
}

}  // namespace ferry::cuda
