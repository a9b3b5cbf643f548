/// First step of route. Every block counts the ids of its tokens. The last block to finish exchanges the counts: it
/// adds them up, posts them to every rank, waits for the counts of the others, and derives where rows begin on every
/// rank. The host waits for no other step.

#include "cuda/driver/launch.hpp"
#include "cuda/intranode/count.cuh"
#include "cuda/intranode/exchange_groups.cuh"
#include "cuda/intranode/exchange_report.cuh"
#include "cuda/placement/counters.cuh"
#include "cuda/sync/kernel_order.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda {
namespace {

using namespace device;

/// Reports that the kernel has started: the host's deadline runs from here. One thread calls it; no step waits for the
/// store.
__device__ void report_started(const RouteParams& params) {
  if (params.host.result != nullptr) store_relaxed_system(&params.host.result->started, 1);
}

/// Adds the counts of this route to the program's counters. `totals`: this rank's counts, visible to all threads since
/// the barriers after their summation.
__device__ __noinline__ void add_counts(const RouteParams& params, const int4* totals, std::uint32_t num_homeless) {
  const auto* const counts = reinterpret_cast<const std::int32_t*>(totals) +
                             plan::CountColumns::of(params.ranks.num_ranks, params.num_experts).first_expert;
  add_to_counters(
      params.counters, params.placement, params.num_experts, params.num_local_experts,
      [counts](int expert) { return counts[expert]; },
      [&params](int local) { return params.tables.rows_per_expert[local]; },
      [num_homeless] { return static_cast<std::int32_t>(num_homeless); });
}

/// Ends a call that all ranks refuse: ranks that made another call wait for `done`. Neither this function nor
/// add_counts is inlined: most calls do not use them, and a short kernel spends its time on fetching code.
__device__ __noinline__ void end_refused(const RankParams& ranks, std::uint64_t epoch) {
  if (warp_idx() != 0) return;
  post_done(ranks, epoch);
  finish_call(ranks, epoch);
}

struct ExchangeParams {
  RouteParams route;
  ScratchOffsets scratch;
};

__global__ void __launch_bounds__(kExchangeThreads) exchange_kernel(const __grid_constant__ ExchangeParams exchange) {
  std::byte* const memory = dynamic_shared();
  auto& shared = static_shared<Shared>();
  const RouteParams& params = exchange.route;
  const RankParams& ranks = params.ranks;
  const auto thread = static_cast<int>(threadIdx.x);
  const bool counted = params.agreement != 0;
  std::byte* const base = thread < ranks.num_ranks ? ranks.peer_bases[thread] : nullptr;
  FirstLoads loads{};
  if (counted) loads = load_first(params);
  const CallStart start = start_call(ranks, nullptr);
  const std::uint64_t epoch = start.epoch;
  if (start.broken) {
    if (blockIdx.x == 0 && thread == 0) report_started(params);
    return;
  }
  const Scratch scratch(memory, exchange.scratch);
  if (thread < ranks.num_ranks) shared.bases[thread] = base;
  if (thread == 0) {
    shared.here = true;
    shared.others = false;
  }
  if (counted) {
    if (!count_tokens(params, loads, scratch, shared)) return;
    prepare_groups(params, scratch, shared);
    sum_blocks(params, scratch, shared);
  } else {
    __syncthreads();
  }
  if (warp_idx() == 0) publish_header(params, shared, epoch);
  if (counted) publish_counts(params, scratch, shared, epoch);
  if (counted && warp_idx() == kSourceWarp) publish_source_offset(params, shared, epoch);
  if (thread == kExchangeThreads - 1) report_started(params);
  if (warp_idx() == kFlagWarp) await_flags(ranks, shared, epoch);
  // Derived before it is known whether the ranks agree. If they do not, no rank reads tables derived from these counts.
  const Posted posted(params, shared, epoch);
  if (counted) {
    load_headers(params, posted, scratch);
    place_token_rows(params, posted, scratch, shared);
    if (params.layout == Layout::kTokens) {
      count_expert_rows(params, posted, scratch);
    } else {
      place_groups(params, posted, scratch, shared);
    }
  }
  __syncthreads();
  if (!shared.here) return;
  if (!counted) {
    end_refused(ranks, epoch);
    return;
  }
  const Verdict verdict = judge(params, scratch, shared, epoch);
  // The next kernel may begin only here, and only after a call that is not refused: while this kernel waits for peers
  // to arrive or to end, the next kernel would hold multiprocessors that they may need. Everything that this kernel
  // still waits for is sent by kernels that are already running.
  if (verdict.go) let_next_kernel_begin();
  report_verdict(params, posted, scratch, verdict, shared.num_token_rows, epoch);
  write_counts_before(params, scratch);  // written last, because the host waits only for the report above
  if (verdict.valid) {                   // the last step ends the call
    if (params.counters.any()) add_counts(params, scratch.totals, shared.num_homeless);
    return;
  }
  if (!verdict.go) {
    end_refused(ranks, epoch);
  } else if (warp_idx() == 0) {
    end_epoch(ranks, epoch);
  }
}

}  // namespace

std::size_t exchange_shared_bytes(int num_ranks, int num_experts, int num_logical) {
  return sizeof(Shared) + ScratchOffsets::of(num_ranks, num_experts, num_logical).size_bytes;
}

cudaError_t launch_exchange(const RouteParams& params, cudaStream_t stream) {
  const bool counts = params.agreement != 0;
  const int num_blocks = params.num_blocks < params.max_blocks ? params.num_blocks : params.max_blocks;
  const int num_logical = params.placement.homes.ranges != nullptr ? params.placement.homes.num_logical : 0;
  const ExchangeParams exchange{params, ScratchOffsets::of(params.ranks.num_ranks, params.num_experts, num_logical)};
  const LaunchShape shape{counts ? static_cast<unsigned>(num_blocks) : 1U, kExchangeThreads,
                          exchange.scratch.size_bytes};
  return launch_kernel(exchange_kernel, shape, exchange, stream);
}

cudaError_t load_exchange_kernel(std::size_t shared_limit) {
  const std::size_t most_bytes = ScratchOffsets::of(kMaxRanks, static_cast<int>(kMaxExperts), 0).size_bytes;
  const std::size_t limit = shared_limit - sizeof(Shared);
  return cudaFuncSetAttribute(exchange_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(most_bytes < limit ? most_bytes : limit));
}

}  // namespace ferry::cuda
