#ifndef FERRY_CUDA_LATENCY_RECEIVE_REPORT_CUH
#define FERRY_CUDA_LATENCY_RECEIVE_REPORT_CUH

/// Reports of one block of the receive half: the Routing's tables of how many rows came, and the counts for the host.

#include <cstdint>

#include "cuda/latency/absent_ranks.cuh"
#include "cuda/latency/receive_counts.cuh"
#include "cuda/placement/counters.cuh"
#include "cuda/placement/pick.cuh"
#include "cuda/sync/entry.cuh"

namespace ferry::cuda::device {

/// Records why the call was refused, in the summary and for the host. One thread. `kHomes`: see receive_dispatch().
template <bool kHomes>
__device__ __noinline__ inline void report_refused(const LatencyParams& call, const DispatchReceiveRows& params,
                                                   const SentCall& sent, const ReceiveShared& shared, Outcome outcome) {
  const auto set = static_cast<int>(sent.set);
  RouteSummary& summary = *call.tables.summary;
  summary.valid = 0;
  summary.fault_column = 0;
  if (outcome == Outcome::kSkip) {
    summary.fault = static_cast<std::int32_t>(Fault::kDisagreement);
    report_latency_disagreement(call, LatencyKind::kDispatch, set);
    if (params.host.result != nullptr) store_release_system(&params.host.result->state, 2);
    return;
  }
  const auto field = [&call, set](int rank, std::size_t offset_bytes) {
    const std::uint64_t* word =
        header_words(call, call.ranks.rank, LatencyKind::kDispatch, set, rank) + offset_bytes / sizeof(std::uint32_t);
    const std::uint64_t low = payload_of(load_relaxed_system(word));
    return static_cast<std::int64_t>(std::uint64_t{payload_of(load_relaxed_system(word + 1))} << 32 | low);
  };
  if (shared.first_bad_rank != kNone) {
    const auto rank = static_cast<int>(shared.first_bad_rank);
    const BadInput bad{rank, field(rank, offsetof(LatencyHeader, bad_entry)),
                       field(rank, offsetof(LatencyHeader, bad_id))};
    if constexpr (kHomes) {
      report_bad_input(summary, bad, call.num_topk, params.placement, call.num_experts);
    } else {
      report_bad_id(summary, bad, call.num_topk, call.num_experts);
    }
  } else if (kHomes && shared.first_other_rank != kNone) {
    // The first rank with another placement than rank 0: the same on every rank.
    constexpr std::size_t kHash = offsetof(LatencyHeader, blocks_or_homes);
    int rank = 1;
#pragma unroll 1
    while (rank + 1 < call.ranks.num_ranks && field(rank, kHash) == field(0, kHash)) ++rank;
    summary.fault = static_cast<std::int32_t>(Fault::kOtherHomes);
    summary.fault_rank = rank;
    summary.fault_row = 0;
    summary.fault_value = 0;
    summary.fault_limit = 0;
  } else {
    const unsigned expert = shared.first_full_expert;
    summary.fault = static_cast<std::int32_t>(Fault::kSlabCapacity);
    summary.fault_rank = params.placement.owner[expert];
    summary.fault_row = expert;
    summary.fault_value = 0;
#pragma unroll 1
    for (int source = 0; source < call.ranks.num_ranks; ++source) {
      summary.fault_value += payload_of(load_relaxed_system(count_words(call, call.ranks.rank, set, source) + expert));
    }
    summary.fault_limit = call.slab_capacity;
  }
  report_refused_dispatch(call.ranks, summary);
  if (params.host.result != nullptr) store_release_system(&params.host.result->state, 2);
}

/// Reports a receive half that was launched before its send half has run: a graph holds one without the other. One
/// thread.
__device__ __noinline__ inline void report_not_sent(const LatencyParams& call) {
  RouteSummary& summary = *call.tables.summary;
  summary.valid = 0;
  summary.fault = static_cast<std::int32_t>(Fault::kNotRouted);
  report_refused_dispatch(call.ranks, summary);
}

/// Prepares the report, before the counts are added up. All threads of the block that reports.
__device__ inline void begin_report(const LatencyParams& call, ReceiveShared& shared) {
#pragma unroll 1
  for (int rank = static_cast<int>(threadIdx.x); rank < call.ranks.num_ranks; rank += static_cast<int>(blockDim.x)) {
    shared.from_rank[rank] = 0;
    shared.to_rank[rank] = 0;
    call.tables.tokens_of_rank[rank] = shared.tokens[rank];
  }
  __syncthreads();
}

/// Whether the rank is masked or absent, so that its rows are sent nowhere. Only Params of groups that mask ranks have
/// a mask.
template <typename Params>
__device__ inline bool is_left_out(const LatencyParams& call, const Params& params, int rank) {
  if constexpr (requires { params.mask; }) return params.mask.state->masked[rank] != 0;
  return is_absent(call, rank);
}

/// Writes the tables that follow from the counts. All threads of the block that reports. `kHomes`: see
/// receive_dispatch().
template <bool kHomes, typename Params>
__device__ __noinline__ inline void report_counts(const LatencyParams& call, const Params& params, const SentCall& sent,
                                                  const ExpertTables& experts, const ReceiveShared& shared) {
  const LatencyTables& tables = call.tables;
  const int num_ranks = call.ranks.num_ranks;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto num_threads = static_cast<int>(blockDim.x);
  const RouteResultTables& host = params.host;
#pragma unroll 1
  for (int local = thread; local <= call.num_local_experts; local += num_threads) {
    const std::int64_t offset = local * call.slab_capacity;
    tables.row_offsets[local] = offset;
    if (host.result != nullptr) host.row_offsets[local] = offset;
    if (local == call.num_local_experts) continue;
    tables.rows_per_expert[local] = experts.local_rows[local];
    if (host.result != nullptr) host.rows_per_expert[local] = experts.local_rows[local];
  }
  if constexpr (kHomes) {
    const std::uint64_t* const own = count_words(call, call.ranks.rank, static_cast<int>(sent.set), call.ranks.rank);
    add_to_counters(
        params.counters, params.placement, call.num_experts, call.num_local_experts,
        [&](int expert) {
          const bool left_out = is_left_out(call, params, home_rank(experts.homes[expert]));
          return left_out ? 0 : static_cast<std::int32_t>(payload_of(load_relaxed_system(own + expert)));
        },
        [&](int local) { return experts.local_rows[local]; },
        [&] {
          constexpr std::size_t kWord = offsetof(LatencyHeader, bad_id) / sizeof(std::uint32_t);
          const std::uint64_t* const header =
              header_words(call, call.ranks.rank, LatencyKind::kDispatch, static_cast<int>(sent.set), call.ranks.rank);
          return static_cast<std::int32_t>(payload_of(load_relaxed_system(header + kWord)));
        });
  }
  const std::int64_t num_rows = call.num_local_experts * call.slab_capacity;
  if (thread == 0) {
    std::int32_t most_tokens = 0;
#pragma unroll 1
    for (int rank = 0; rank < num_ranks; ++rank) most_tokens = max(most_tokens, shared.tokens[rank]);
    *tables.most_tokens = most_tokens;
    tables.summary->num_used_rows = static_cast<std::int32_t>(num_rows);
    tables.summary->valid = 1;
  }
  if (host.result == nullptr) return;
#pragma unroll 1
  for (int rank = thread; rank < num_ranks; rank += num_threads) {
    host.from_rank[rank] = shared.from_rank[rank];
    host.to_rank[rank] = is_left_out(call, params, rank) ? 0 : shared.to_rank[rank];
  }
  if (thread == 0) {
    host.result->num_used_rows = num_rows;
    host.result->repeats = 1;  // not used in latency mode
  }
  __syncthreads();
  if (thread == 0) {
    fence_system();
    store_relaxed_system(&host.result->state, 1);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_RECEIVE_REPORT_CUH
