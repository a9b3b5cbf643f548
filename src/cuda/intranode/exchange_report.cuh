#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_REPORT_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_REPORT_CUH

/// What the count exchange reports to the host: the counts, or why the call was refused.

#include <cstdint>

#include "cuda/intranode/exchange_counts.cuh"
#include "cuda/sync/entry.cuh"

namespace ferry::cuda::device {

/// Records why the call was refused, in the summary and for the host. One thread.
__device__ inline void report_fault(const RouteParams& params, const Posted& posted, std::uint64_t epoch, Fault fault,
                                    std::int64_t at, const unsigned long long* rank_rows) {
  RouteSummary& summary = *params.tables.summary;
  summary.valid = 0;
  summary.fault = static_cast<std::int32_t>(fault);
  summary.fault_column = 0;
  const int num_ranks = params.ranks.num_ranks;
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
    summary.fault_limit = posted.header(static_cast<int>(at)).max_recv_rows;
  }
  FaultReport& report = *params.host.fault;
  if (*static_cast<volatile std::uint64_t*>(&report.state) != 0) return;
  report.fault = static_cast<std::int32_t>(fault);
  report.rank = static_cast<std::int32_t>(summary.fault_rank);
  report.row = summary.fault_row;
  report.column = summary.fault_column;
  report.value = summary.fault_value;
  report.limit = summary.fault_limit;
  for (int rank = 0; rank < num_ranks; ++rank)
    report.record_numbers[rank] = record_number_of(params.ranks, rank, epoch);
  fence_system();
  store_release_system(&report.state, 1);
}

/// Reports the result to the host. All threads.
__device__ inline void report_result(const RouteParams& params, bool valid, bool repeats) {
  if (params.host.result == nullptr) return;
  const RankParams& ranks = params.ranks;
  if (valid) {
    const bool by_token = params.layout == Layout::kTokens;
    for (int rank = static_cast<int>(threadIdx.x); by_token && rank < ranks.num_ranks; rank += kExchangeThreads) {
      params.host.from_rank[rank] = params.tables.source_base[rank + 1] - params.tables.source_base[rank];
      params.host.to_rank[rank] = params.tables.block_ranks[params.num_blocks * ranks.num_ranks + rank];
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
  result.repeats = repeats ? 1 : 0;
  fence_system();
  store_release_system(&result.state, valid ? 1 : 2);
}

/// Reports from_rank and to_rank of layouts whose rows are (token, expert) pairs.
__device__ inline void report_expert_rows(const RouteParams& params, const Posted& posted) {
  if (params.host.result == nullptr || params.layout == Layout::kTokens) return;
  const RankParams& ranks = params.ranks;
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks; rank += kExchangeThreads) {
    std::int64_t from = 0;
    std::int64_t to = 0;
    const std::int32_t* first_of_rank = params.placement.first_of_rank;
    for (int at = first_of_rank[ranks.rank]; at < first_of_rank[ranks.rank + 1]; ++at) {
      from += posted.count(rank, ranks.num_ranks + params.placement.by_owner[at]);
    }
    for (int at = first_of_rank[rank]; at < first_of_rank[rank + 1]; ++at) {
      to += posted.count(ranks.rank, ranks.num_ranks + params.placement.by_owner[at]);
    }
    params.host.from_rank[rank] = from;
    params.host.to_rank[rank] = to;
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_REPORT_CUH
