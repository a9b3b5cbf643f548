#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_REPORT_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_REPORT_CUH

/// Report of the count exchange to later kernels and to the host: the counts, or why the call was refused.

#include <cstdint>

#include "cuda/intranode/exchange_counts.cuh"
#include "cuda/sync/entry.cuh"
#include "plan/slots.hpp"

namespace ferry::cuda::device {

/// Judges the counts of all ranks; every rank reaches the same verdict. All lanes of one warp call it, after the
/// headers and rows of all ranks are known.
__device__ inline Verdict judge(const RouteParams& params, const Scratch& scratch, const Shared& shared,
                                std::uint64_t epoch) {
  const unsigned num_ranks = static_cast<unsigned>(params.ranks.num_ranks);
  bool equal = true;
  bool repeats = false;
  bool known = false;
  unsigned first_bad = num_ranks;
  unsigned first_full = num_ranks;
  unsigned first_other = num_ranks;
#pragma unroll 1
  for (unsigned rank = static_cast<unsigned>(lane_idx()); rank < num_ranks; rank += kWarpLanes) {
    const CountsHeader& header = scratch.headers[rank];
    equal = equal && header.epoch == epoch && header.agreement == params.agreement;
    repeats = repeats || header.repeats != 0;
    // Hosts of ranks that refuse, make another call, or have an exact route learn of a refusal at once.
    const bool bounded = header.max_recv_rows > 0 || params.layout == Layout::kSlab;
    known = known || header.epoch != epoch || header.agreement == 0 || !bounded;
    if (header.bad_entry >= 0 && rank < first_bad) first_bad = rank;
    if (header.homes_hash != scratch.headers[0].homes_hash && rank < first_other) first_other = rank;
    if (scratch.rank_rows[rank] > plan::row_limit(header.max_recv_rows) && rank < first_full) first_full = rank;
  }
  equal = __all_sync(0xFFFFFFFFU, equal) != 0;
  first_bad = __reduce_min_sync(0xFFFFFFFFU, first_bad);
  first_full = __reduce_min_sync(0xFFFFFFFFU, first_full);
  first_other = __reduce_min_sync(0xFFFFFFFFU, first_other);
  Verdict verdict;
  verdict.repeats = __any_sync(0xFFFFFFFFU, repeats) != 0;
  verdict.known_to_some = __any_sync(0xFFFFFFFFU, known) != 0;
  const bool good_inputs = first_bad == num_ranks;
  verdict.go = equal && good_inputs && first_other == num_ranks;
  const bool slabs_fit = shared.first_full_expert == kNoExpert;
  verdict.valid = verdict.go && slabs_fit && first_full == num_ranks;
  verdict.fault = !equal         ? Fault::kDisagreement
                  : !good_inputs ? Fault::kBadId
                  : !verdict.go  ? Fault::kOtherHomes
                  : !slabs_fit   ? Fault::kSlabCapacity
                                 : Fault::kRowCapacity;
  verdict.at = !good_inputs  ? first_bad
               : !verdict.go ? first_other
               : !slabs_fit  ? static_cast<std::int64_t>(shared.first_full_expert)
                             : first_full;
  return verdict;
}

/// Records why the call was refused, in the summary and for the host. One thread calls it. Not inlined, and arguments
/// other than the kernel's parameter are passed by value, so that valid calls keep them in registers.
__device__ __noinline__ inline void report_fault(const RouteParams& params, Posted posted, Scratch scratch,
                                                 Verdict verdict, std::uint64_t epoch) {
  RouteSummary& summary = *params.tables.summary;
  const std::int64_t at = verdict.at;
  const int num_ranks = params.ranks.num_ranks;
  summary.fault = static_cast<std::int32_t>(verdict.fault);
  summary.fault_column = 0;
  if (verdict.fault == Fault::kBadId) {
    const CountsHeader& header = scratch.headers[at];
    report_bad_input(summary, {at, header.bad_entry, header.bad_id}, params.num_topk, params.placement,
                     params.num_experts);
  } else if (verdict.fault == Fault::kOtherHomes) {
    summary.fault_rank = at;
  } else if (verdict.fault == Fault::kSlabCapacity) {
    summary.fault_rank = scratch.owner[at];
    summary.fault_row = at;
    summary.fault_value = 0;
#pragma unroll 1
    for (int source = 0; source < num_ranks; ++source) {
      summary.fault_value += posted.count(source, posted.first_expert + static_cast<int>(at));
    }
    summary.fault_limit = params.slab_capacity;
  } else if (verdict.fault == Fault::kRowCapacity) {
    summary.fault_rank = at;
    summary.fault_value = scratch.rank_rows[at];
    summary.fault_limit = scratch.headers[at].max_recv_rows;
  }
  FaultReport& report = *params.host.fault;
  if (*static_cast<volatile std::uint64_t*>(&report.state) != 0) return;
  copy_fault(report, summary);
#pragma unroll 1
  for (int rank = 0; rank < num_ranks; ++rank)
    report.record_numbers[rank] = record_number_of(params.ranks, rank, epoch);
  fence_system();
  store_release_system(&report.state, 1);
}

/// Reports the outcome to the host, if it asks, and to later kernels. The first thread calls it. For a valid route the
/// host waits for this outcome and for all words; for a refused route it waits for the outcome only, and no thread may
/// write to these words afterwards.
///
/// The host may learn that a route is valid before the last wait of this kernel that can fail: the wait for the
/// locations of the source tables. If that wait fails, the group is broken. The counts are correct nevertheless; the
/// last step and all later calls move nothing; and the host learns of the loss with its next call or wait, as it does
/// when the last step's own wait fails.
__device__ inline void report_outcome(const RouteParams& params, const Posted& posted, const Scratch& scratch,
                                      const Verdict& verdict, std::int32_t num_token_rows, std::uint64_t epoch) {
  const auto num_used_rows = static_cast<std::int32_t>(scratch.rank_rows[params.ranks.rank]);
  RouteResult* const result = params.host.result;
  if (verdict.valid && result != nullptr) store_relaxed_system(&result->state, RouteResult::kValid);
  tell_host(params, params.host_words.used_rows(), num_used_rows);
  tell_host(params, params.host_words.token_rows(), num_token_rows);
  tell_host(params, params.host_words.repeats(), verdict.repeats ? 1 : 0);
  RouteSummary& summary = *params.tables.summary;
  summary.valid = verdict.valid ? 1 : 0;
  if (verdict.go) {
    summary.num_used_rows = num_used_rows;
    summary.num_token_rows = num_token_rows;
  }
  if (verdict.valid) return;
  // The details of the refusal must be visible to the host before the outcome, as must the words that all threads wrote
  // before the last barrier.
  report_fault(params, posted, scratch, verdict, epoch);
  if (result == nullptr) return;
  fence_system();
  store_relaxed_system(&result->state, verdict.known_to_some ? RouteResult::kRefusedBySome : RouteResult::kRefused);
}

/// Reports the outcome, and the values of each rank that later kernels need. All threads call it.
__device__ inline void report_verdict(const RouteParams& params, const Posted& posted, const Scratch& scratch,
                                      const Verdict& verdict, std::int32_t num_token_rows, std::uint64_t epoch) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) report_outcome(params, posted, scratch, verdict, num_token_rows, epoch);
#pragma unroll 1
  for (int rank = thread; rank < params.ranks.num_ranks; rank += kExchangeThreads) {
    // In other cases the host already has them, or needs none and may have released their memory.
    if (verdict.valid && params.layout != Layout::kTokens) {
      tell_host(params, params.host_words.from_rank() + rank, scratch.from_rank[rank]);
      tell_host(params, params.host_words.to_rank() + rank, scratch.to_rank[rank]);
    }
    const CountsHeader& header = scratch.headers[rank];
    const bool fits = scratch.rank_rows[rank] <= header.source_rows;
    params.tables.tokens_of_rank[rank] = header.num_tokens;
    params.tables.source_offsets[rank] = verdict.valid && fits ? posted.source_offset(rank) : kAnnouncedLater;
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_REPORT_CUH
