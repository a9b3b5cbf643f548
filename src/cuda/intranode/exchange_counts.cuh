#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH

/// Counts between ranks: how the exchanging block posts this rank's, and reads those of all.

#include <cstdint>

#include "cuda/intranode/entries.cuh"

namespace ferry::cuda::device {

inline constexpr int kExchangeThreads = 1024;
/// Counts of this many blocks are loaded together, to overlap their latencies.
inline constexpr int kPrefixBatch = 16;

/// Turns the blocks' counts of one run into counts before each block; returns the total.
__device__ inline std::int32_t sum_blocks(std::int32_t* counts, int stride, int num_blocks) {
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

__device__ inline void publish_counts(const RouteParams& params, std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  const int num_runs = ranks.num_ranks + params.num_experts;
  const auto slot = static_cast<std::size_t>(epoch % 2) * static_cast<std::size_t>(ranks.num_ranks) +
                    static_cast<std::size_t>(ranks.rank);
  const bool counted = params.agreement != 0;
  for (int run = static_cast<int>(threadIdx.x); counted && run < num_runs; run += kExchangeThreads) {
    std::int32_t total = 0;
    if (run < ranks.num_ranks) {
      total = sum_blocks(params.tables.block_ranks + run, ranks.num_ranks, params.num_blocks);
      params.tables.block_ranks[params.num_blocks * ranks.num_ranks + run] = total;
    } else {
      const int expert = run - ranks.num_ranks;
      total = sum_blocks(params.tables.block_experts + expert, params.num_experts, params.num_blocks);
    }
    for (int rank = 0; rank < ranks.num_ranks; ++rank) {
      control_of(ranks, rank).counts[slot * static_cast<std::size_t>(ranks.num_ranks + kMaxExperts) + run] = total;
    }
  }
  const std::int64_t num_entries = params.num_tokens * params.num_topk;
  const std::int64_t bad_entry = counted ? params.tables.id_marks[kBadIdMark] : num_entries;
  const bool bad = counted && bad_entry < num_entries;
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks; rank += kExchangeThreads) {
    CountsHeader& header = control_of(ranks, rank).headers[slot];
    header.agreement = params.agreement;
    header.record_number = params.record_number;
    header.max_recv_rows = params.max_recv_rows;
    header.num_tokens = params.num_tokens;
    header.repeats = counted && params.tables.id_marks[kRepeatMark] == 0 ? 1 : 0;
    header.bad_entry = bad ? bad_entry : -1;
    header.bad_id = bad ? load_id(params, bad_entry) : 0;
  }
  __syncthreads();
  for (int rank = static_cast<int>(threadIdx.x); rank < ranks.num_ranks; rank += kExchangeThreads) {
    fence_system();
    store_release_system(&control_of(ranks, rank).counts_ready[ranks.rank], epoch);
  }
}

/// What every rank posted in this epoch.
struct Posted {
  const CountsHeader* headers;
  const std::int32_t* counts;
  std::size_t stride;

  __device__ Posted(const RankParams& ranks, std::uint64_t epoch)
      : headers(ranks.control.headers + (epoch % 2) * static_cast<std::uint64_t>(ranks.num_ranks)),
        stride(static_cast<std::size_t>(ranks.num_ranks + kMaxExperts)) {
    counts = ranks.control.counts + (epoch % 2) * static_cast<std::uint64_t>(ranks.num_ranks) * stride;
  }
  /// Volatile: a peer wrote it while this kernel ran.
  __device__ std::int32_t count(int source, int run) const {
    return *static_cast<const volatile std::int32_t*>(counts + static_cast<std::size_t>(source) * stride + run);
  }
  __device__ const volatile CountsHeader& header(int source) const { return headers[source]; }
};

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH
