/// Second step of route: one block adds up the counts, shows them to every rank, waits for theirs, and derives where
/// this rank's rows begin everywhere. This is all that the host waits for.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/entries.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda {
namespace {

using namespace device;

constexpr int kExchangeThreads = 1024;
/// Counts of this many blocks are loaded together, to overlap their latencies.
constexpr int kPrefixBatch = 16;
constexpr std::int64_t kNoFault = INT64_MAX;

/// Scratch of the block.
struct Shared {
  Outcome outcome;
  unsigned long long first_fault;  // index of the expert or rank at fault, lowest first
  std::int32_t warp_sums[kExchangeThreads / kWarpLanes];
  std::int32_t carry;
};

/// Shared memory whose size depends on the call.
struct Scratch {
  std::int32_t* group_first;      ///< [E] first row of each group, counted over all ranks
  unsigned long long* rank_rows;  ///< [R] rows of each rank
  std::size_t size_bytes;

  FERRY_HOST_DEVICE static Scratch at(std::byte* base, const RouteParams& params) {
    plan::Carver carver(base);
    Scratch scratch{};
    scratch.group_first = carver.take<std::int32_t>(static_cast<std::size_t>(params.num_experts));
    scratch.rank_rows = carver.take<unsigned long long>(static_cast<std::size_t>(params.crew.num_ranks));
    scratch.size_bytes = carver.used_bytes();
    return scratch;
  }
};

/// Turns the blocks' counts of one run into counts before each block; returns the total.
__device__ std::int32_t sum_blocks(std::int32_t* counts, int stride, int num_blocks) {
  std::int32_t total = 0;
  for (int first = 0; first < num_blocks; first += kPrefixBatch) {
    std::int32_t batch[kPrefixBatch];
#pragma unroll
    for (int i = 0; i < kPrefixBatch; ++i) batch[i] = first + i < num_blocks ? counts[(first + i) * stride] : 0;
#pragma unroll
    for (int i = 0; i < kPrefixBatch; ++i) {
      if (first + i < num_blocks) counts[(first + i) * stride] = total;
      total += batch[i];
    }
  }
  return total;
}

__device__ void publish_counts(const RouteParams& params, std::uint64_t epoch) {
  const CrewParams& crew = params.crew;
  const int num_runs = crew.num_ranks + params.num_experts;
  const auto place = static_cast<std::size_t>(epoch % 2) * static_cast<std::size_t>(crew.num_ranks) +
                     static_cast<std::size_t>(crew.rank);
  const bool counted = params.agreement != 0;
  for (int run = static_cast<int>(threadIdx.x); counted && run < num_runs; run += kExchangeThreads) {
    std::int32_t total = 0;
    if (run < crew.num_ranks) {
      total = sum_blocks(params.tables.block_ranks + run, crew.num_ranks, params.num_blocks);
      params.tables.block_ranks[params.num_blocks * crew.num_ranks + run] = total;
    } else {
      const int expert = run - crew.num_ranks;
      total = sum_blocks(params.tables.block_experts + expert, params.num_experts, params.num_blocks);
    }
    for (int rank = 0; rank < crew.num_ranks; ++rank) {
      control_of(crew, rank).counts[place * static_cast<std::size_t>(crew.num_ranks + kMaxExperts) + run] = total;
    }
  }
  const std::int64_t num_entries = params.num_tokens * params.num_topk;
  const std::int64_t bad_entry = counted ? *params.tables.bad_entry : num_entries;
  const bool bad = counted && bad_entry < num_entries;
  for (int rank = static_cast<int>(threadIdx.x); rank < crew.num_ranks; rank += kExchangeThreads) {
    CountsHeader& header = control_of(crew, rank).headers[place];
    header.agreement = params.agreement;
    header.ticket = params.ticket;
    header.max_recv_rows = params.max_recv_rows;
    header.bad_entry = bad ? bad_entry : -1;
    header.bad_id = bad ? load_id(params, bad_entry) : 0;
  }
  __syncthreads();
  for (int rank = static_cast<int>(threadIdx.x); rank < crew.num_ranks; rank += kExchangeThreads) {
    fence_system();
    store_release_system(&control_of(crew, rank).counts_ready[crew.rank], epoch);
  }
}

/// What every rank posted in this epoch.
struct Posted {
  const CountsHeader* headers;
  const std::int32_t* counts;
  std::size_t stride;

  __device__ Posted(const CrewParams& crew, std::uint64_t epoch)
      : headers(crew.control.headers + (epoch % 2) * static_cast<std::uint64_t>(crew.num_ranks)),
        stride(static_cast<std::size_t>(crew.num_ranks + kMaxExperts)) {
    counts = crew.control.counts + (epoch % 2) * static_cast<std::uint64_t>(crew.num_ranks) * stride;
  }
  /// Volatile: a peer wrote it while this kernel ran.
  __device__ std::int32_t count(int source, int run) const {
    return *static_cast<const volatile std::int32_t*>(counts + static_cast<std::size_t>(source) * stride + run);
  }
  __device__ const volatile CountsHeader& header(int source) const { return headers[source]; }
};

/// Inclusive sum over the block's threads, in thread order.
__device__ std::int32_t scan_block(Shared& shared, std::int32_t value) {
  std::int32_t sum = value;
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const std::int32_t below = __shfl_up_sync(0xFFFFFFFFU, sum, static_cast<unsigned>(distance));
    if (lane_idx() >= distance) sum += below;
  }
  if (lane_idx() == kWarpLanes - 1) shared.warp_sums[warp_idx()] = sum;
  __syncthreads();
  if (warp_idx() == 0) {
    std::int32_t warp_sum = shared.warp_sums[lane_idx()];
    for (int distance = 1; distance < kWarpLanes; distance *= 2) {
      const std::int32_t below = __shfl_up_sync(0xFFFFFFFFU, warp_sum, static_cast<unsigned>(distance));
      if (lane_idx() >= distance) warp_sum += below;
    }
    shared.warp_sums[lane_idx()] = warp_sum;
  }
  __syncthreads();
  const std::int32_t result = sum + (warp_idx() > 0 ? shared.warp_sums[warp_idx() - 1] : 0);
  __syncthreads();
  return result;
}

/// Rows that each expert's group takes and where it begins, in `group_first` [E] and `rank_rows` [R] (shared memory).
__device__ void place_groups(const RouteParams& params, const Posted& posted, Shared& shared, std::int32_t* group_first,
                             unsigned long long* rank_rows) {
  const int num_ranks = params.crew.num_ranks;
  for (int first = 0; first < params.num_experts; first += kExchangeThreads) {
    const int at = first + static_cast<int>(threadIdx.x);
    const int expert = at < params.num_experts ? params.placement.by_owner[at] : -1;
    std::int32_t rows = 0;
    std::int32_t before_me = 0;
    if (expert >= 0) {
      for (int source = 0; source < num_ranks; ++source) {
        const std::int32_t count = posted.count(source, num_ranks + expert);
        if (source < params.crew.rank) before_me += count;
        rows += count;
      }
      if (params.layout == Layout::kSlab && rows > params.slab_capacity) {
        atomicMin(&shared.first_fault, static_cast<unsigned long long>(expert));
      }
      if (params.placement.owner[expert] == params.crew.rank) {
        params.tables.rows_per_expert[params.placement.local_expert[expert]] = rows;
      }
    }
    const std::int64_t group_rows =
        params.layout == Layout::kSlab ? params.slab_capacity : plan::aligned_group_rows(rows, params.expert_alignment);
    const auto group = static_cast<std::int32_t>(group_rows);
    const std::int32_t end = scan_block(shared, expert >= 0 ? group : 0) + shared.carry;
    if (expert >= 0) {
      // 64 bits: a sum that does not fit the tables must be seen, not wrap.
      atomicAdd(&rank_rows[params.placement.owner[expert]], static_cast<unsigned long long>(group_rows));
      group_first[at] = end - group;
      params.tables.expert_base[expert] = before_me;
    }
    __syncthreads();
    if (threadIdx.x == kExchangeThreads - 1) shared.carry = end;
    __syncthreads();
  }
  const std::int32_t* first_of_rank = params.placement.first_of_rank;
  for (int at = static_cast<int>(threadIdx.x); at < params.num_experts; at += kExchangeThreads) {
    const int expert = params.placement.by_owner[at];
    const int owner = params.placement.owner[expert];
    const std::int32_t first = group_first[at] - group_first[first_of_rank[owner]];
    params.tables.expert_base[expert] += first;
    if (owner == params.crew.rank) params.tables.row_offsets[params.placement.local_expert[expert]] = first;
  }
  if (threadIdx.x == 0)
    params.tables.row_offsets[params.num_local_experts] = static_cast<std::int64_t>(rank_rows[params.crew.rank]);
}

/// Token rows of each (source, rank) pair; `rank_rows` too where those are the rows.
__device__ void place_token_rows(const RouteParams& params, const Posted& posted, unsigned long long* rank_rows) {
  const int num_ranks = params.crew.num_ranks;
  for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += kExchangeThreads) {
    std::int32_t before_me = 0;
    std::int64_t rows = 0;
    for (int source = 0; source < num_ranks; ++source) {
      const std::int32_t count = posted.count(source, rank);
      if (source < params.crew.rank) before_me += count;
      rows += count;
    }
    params.tables.rank_base[rank] = before_me;
    if (params.layout == Layout::kTokens) rank_rows[rank] = static_cast<unsigned long long>(rows);
  }
  if (threadIdx.x == 0) {
    std::int32_t base = 0;
    for (int source = 0; source < num_ranks; ++source) {
      params.tables.source_base[source] = base;
      base += posted.count(source, params.crew.rank);
    }
    params.tables.source_base[num_ranks] = base;
  }
}

/// Rows that a rank can take: what it made room for, or what fits the tables.
__device__ std::int64_t row_limit(const Posted& posted, int rank) {
  const std::int64_t limit = posted.header(rank).max_recv_rows;
  return limit > 0 ? limit : INT32_MAX;
}

/// One thread: what refused the call, in the summary and for the host.
__device__ void report_fault(const RouteParams& params, const Posted& posted, std::uint64_t epoch, Fault fault,
                             std::int64_t at, const unsigned long long* rank_rows) {
  RouteSummary& summary = *params.tables.summary;
  summary.valid = 0;
  summary.fault = static_cast<std::int32_t>(fault);
  summary.fault_column = 0;
  const int num_ranks = params.crew.num_ranks;
  if (fault == Fault::kBadId) {
    summary.fault_rank = at;
    const std::int64_t entry = posted.header(static_cast<int>(at)).bad_entry;
    summary.fault_row = entry / params.num_topk;
    summary.fault_column = entry % params.num_topk;
    summary.fault_value = posted.header(static_cast<int>(at)).bad_id;
    summary.fault_limit = params.num_experts - 1;
  } else if (fault == Fault::kSlabCapacity) {
    summary.fault_rank = params.placement.owner[at];
    summary.fault_row = at;
    summary.fault_value = 0;
    for (int source = 0; source < num_ranks; ++source) {
      summary.fault_value += posted.count(source, num_ranks + static_cast<int>(at));
    }
    summary.fault_limit = params.slab_capacity;
  } else if (fault == Fault::kRowCapacity) {
    summary.fault_rank = at;
    summary.fault_value = static_cast<std::int64_t>(rank_rows[at]);
    summary.fault_limit = row_limit(posted, static_cast<int>(at));
  }
  FaultReport& report = *params.host.fault;
  if (*static_cast<volatile std::uint64_t*>(&report.state) != 0) return;
  report.fault = static_cast<std::int32_t>(fault);
  report.rank = static_cast<std::int32_t>(summary.fault_rank);
  report.row = summary.fault_row;
  report.column = summary.fault_column;
  report.value = summary.fault_value;
  report.limit = summary.fault_limit;
  for (int rank = 0; rank < num_ranks; ++rank) report.tickets[rank] = ticket_of(params.crew, rank, epoch);
  fence_system();
  store_release_system(&report.state, 1);
}

/// What the host learns. All threads.
__device__ void tell_host(const RouteParams& params, bool valid) {
  if (params.host.result == nullptr) return;
  const CrewParams& crew = params.crew;
  if (valid) {
    const bool by_token = params.layout == Layout::kTokens;
    for (int rank = static_cast<int>(threadIdx.x); by_token && rank < crew.num_ranks; rank += kExchangeThreads) {
      params.host.from_rank[rank] = params.tables.source_base[rank + 1] - params.tables.source_base[rank];
      params.host.to_rank[rank] = params.tables.block_ranks[params.num_blocks * crew.num_ranks + rank];
    }
    for (int expert = static_cast<int>(threadIdx.x); expert < params.num_local_experts; expert += kExchangeThreads) {
      params.host.rows_per_expert[expert] = params.tables.rows_per_expert[expert];
    }
    for (int expert = static_cast<int>(threadIdx.x); !by_token && expert <= params.num_local_experts;
         expert += kExchangeThreads) {
      params.host.row_offsets[expert] = params.tables.row_offsets[expert];
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  RouteResult& result = *params.host.result;
  result.num_used_rows = params.tables.summary->num_used_rows;
  result.num_token_rows = params.tables.summary->num_token_rows;
  fence_system();
  store_release_system(&result.state, valid ? 1 : 2);
}

/// Rows by expert count once per (token, expert): the host's from_rank and to_rank of these layouts.
__device__ void tell_host_expert_rows(const RouteParams& params, const Posted& posted) {
  if (params.host.result == nullptr || params.layout == Layout::kTokens) return;
  const CrewParams& crew = params.crew;
  for (int rank = static_cast<int>(threadIdx.x); rank < crew.num_ranks; rank += kExchangeThreads) {
    std::int64_t from = 0;
    std::int64_t to = 0;
    const std::int32_t* first_of_rank = params.placement.first_of_rank;
    for (int at = first_of_rank[crew.rank]; at < first_of_rank[crew.rank + 1]; ++at) {
      from += posted.count(rank, crew.num_ranks + params.placement.by_owner[at]);
    }
    for (int at = first_of_rank[rank]; at < first_of_rank[rank + 1]; ++at) {
      to += posted.count(crew.rank, crew.num_ranks + params.placement.by_owner[at]);
    }
    params.host.from_rank[rank] = from;
    params.host.to_rank[rank] = to;
  }
}

__global__ void __launch_bounds__(kExchangeThreads) exchange_kernel(RouteParams params) {
  extern __shared__ __align__(64) std::byte memory[];
  __shared__ Shared shared;
  const CrewParams& crew = params.crew;
  if (is_broken(crew)) return;
  const std::uint64_t epoch = current_epoch(crew);
  publish_counts(params, epoch);
  const Posted posted(crew, epoch);
  if (warp_idx() == 0) {
    // A rank that dispatches or combines instead posts an entry.
    const bool here = wait_all_ranks(crew, Awaited::kCounts, count_flags(crew), epoch, entry_flags(crew));
    bool equal = true;
    bool good = true;
    for (int rank = lane_idx(); here && rank < crew.num_ranks; rank += kWarpLanes) {
      const std::uint64_t theirs = posted.header(rank).agreement;
      equal = equal && count_flags(crew).load(rank) >= epoch && theirs == params.agreement && theirs != 0;
      good = good && posted.header(rank).bad_entry < 0;
    }
    const bool all_equal = __all_sync(0xFFFFFFFFU, equal) != 0;
    const bool all_good = __all_sync(0xFFFFFFFFU, good) != 0;
    if (lane_idx() == 0) {
      shared.outcome = !here ? Outcome::kStop : all_equal && all_good ? Outcome::kGo : Outcome::kSkip;
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
    if (params.agreement != 0) tell_host(params, false);
    // Who made another call ends it as calls end there.
    if (warp_idx() == 0) {
      post_done(crew, epoch);
      finish_call(crew, epoch);
    }
    return;
  }
  const Scratch scratch = Scratch::at(memory, params);
  std::int32_t* group_first = scratch.group_first;
  unsigned long long* rank_rows = scratch.rank_rows;
  for (int rank = static_cast<int>(threadIdx.x); rank < crew.num_ranks; rank += kExchangeThreads) rank_rows[rank] = 0;
  __syncthreads();
  place_token_rows(params, posted, rank_rows);
  if (params.layout == Layout::kTokens) {
    for (int expert = static_cast<int>(threadIdx.x); expert < params.num_experts; expert += kExchangeThreads) {
      if (params.placement.owner[expert] != crew.rank) continue;
      std::int32_t rows = 0;
      for (int source = 0; source < crew.num_ranks; ++source) rows += posted.count(source, crew.num_ranks + expert);
      params.tables.rows_per_expert[params.placement.local_expert[expert]] = rows;
    }
  } else {
    place_groups(params, posted, shared, group_first, rank_rows);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    RouteSummary& summary = *params.tables.summary;
    summary.valid = 1;
    summary.num_used_rows = static_cast<std::int32_t>(rank_rows[crew.rank]);
    summary.num_token_rows = params.tables.source_base[crew.num_ranks];
    if (shared.first_fault != kNoFault) {
      report_fault(params, posted, epoch, Fault::kSlabCapacity, static_cast<std::int64_t>(shared.first_fault),
                   rank_rows);
    }
    for (int rank = 0; summary.valid != 0 && rank < crew.num_ranks; ++rank) {
      const std::int64_t limit = posted.header(rank).max_recv_rows;
      if (limit > 0 && rank_rows[rank] > limit)
        report_fault(params, posted, epoch, Fault::kRowCapacity, rank, rank_rows);
    }
  }
  __syncthreads();
  const bool valid = params.tables.summary->valid != 0;
  if (valid && params.layout != Layout::kTokens) tell_host_expert_rows(params, posted);
  tell_host(params, valid);
  if (threadIdx.x == 0) crew.control.local->epoch = epoch;
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
