#ifndef FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH
#define FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH

/// Counts between ranks: how the exchanging block posts this rank's, and reads those of all.

#include <cstdint>

#include "cuda/intranode/entries.cuh"
#include "cuda/intranode/exchange_scratch.cuh"

namespace ferry::cuda::device {

/// Sources whose counts a thread loads together: one latency up to 8 ranks.
inline constexpr int kSourceBatch = 8;

/// Where this rank's headers and counts of `epoch` begin, here and in every rank's memory.
struct PostedSlot {
  std::size_t first_rank;  ///< slots are [2][R]
  std::size_t stride;      ///< of counts

  __device__ PostedSlot(const RankParams& ranks, std::uint64_t epoch)
      : first_rank(static_cast<std::size_t>(epoch % 2) * static_cast<std::size_t>(ranks.num_ranks)),
        stride(Control::counts_stride(static_cast<std::size_t>(ranks.num_ranks))) {}
};

/// The same word of another rank's control block.
template <typename T>
__device__ inline T* on_rank(const RankParams& ranks, std::byte* base, T* own) {
  return reinterpret_cast<T*>(base + (reinterpret_cast<std::byte*>(own) - ranks.peer_bases[ranks.rank]));
}

/// Tells the host a count, if it asks: RouteWords. 64 bits, of which it gets what there is in routes that are good.
__device__ inline void tell_host(const RouteParams& params, std::uint64_t* word, std::int64_t count) {
  if (params.host_words.words == nullptr) return;
  store_relaxed_system(word, RouteWords::kThere | static_cast<std::uint32_t>(count));
}

/// Fills in this rank's header. One thread, after sum_blocks.
__device__ inline void make_header(const RouteParams& params, Shared& shared, std::uint64_t epoch) {
  const bool counted = params.agreement != 0;
  const bool bad = counted && shared.bad_entry != kNoEntry;
  CountsHeader& header = shared.header;
  header.epoch = epoch;
  header.agreement = params.agreement;
  header.record_number = params.record_number;
  header.max_recv_rows = params.max_recv_rows;
  header.num_tokens = params.num_tokens;
  header.bad_entry = bad ? static_cast<std::int64_t>(shared.bad_entry) : -1;
  header.bad_id = bad ? load_id(params, static_cast<std::int64_t>(shared.bad_entry)) : 0;
  note_bad_homes(params.placement, header.bad_entry, header.bad_id);
  header.homes_hash = hash_of_homes(params.placement);
  header.repeats = counted && shared.repeats != 0 ? 1 : 0;
  header.source_offset = params.source_offset;
  header.source_rows = params.source_rows;
}

/// Sends every rank this rank's header, and its counts unless it refuses. All threads.
__device__ inline void publish_counts(const RouteParams& params, const Scratch& scratch, Shared& shared,
                                      std::uint64_t epoch) {
  const RankParams& ranks = params.ranks;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) make_header(params, shared, epoch);
  __syncthreads();
  const PostedSlot slot(ranks, epoch);
  const std::size_t mine = slot.first_rank + static_cast<std::size_t>(ranks.rank);
  auto* const headers = reinterpret_cast<int4*>(&ranks.control.headers[mine]);
  auto* const counts = reinterpret_cast<int4*>(&ranks.control.counts[mine * slot.stride]);
  const auto* const header = reinterpret_cast<const int4*>(&shared.header);
  constexpr int kHeaderQuads = static_cast<int>(sizeof(CountsHeader) / sizeof(int4));
  const int count_quads =
      params.agreement == 0 ? 0 : plan::CountColumns::of(ranks.num_ranks, params.num_experts).num_quads();
  const int num_quads = kHeaderQuads + count_quads;
#pragma unroll 1
  for (int i = thread; i < ranks.num_ranks * num_quads; i += kExchangeThreads) {
    const int rank = i / num_quads;
    const int quad = i - rank * num_quads;
    if (quad < kHeaderQuads) {
      on_rank(ranks, shared.bases[rank], headers)[quad] = header[quad];
    } else {
      on_rank(ranks, shared.bases[rank], counts)[quad - kHeaderQuads] = scratch.totals[quad - kHeaderQuads];
    }
  }
  __syncthreads();
  if (thread >= ranks.num_ranks) return;
  fence_system();
  store_relaxed_system(&on_rank(ranks, shared.bases[thread], ranks.control.counts_ready)[ranks.rank], epoch);
}
static_assert(kMaxRanks <= kExchangeThreads, "a thread for each rank");

/// What every rank posted in this epoch.
struct Posted {
  const CountsHeader* headers;
  const std::int32_t* counts;
  std::size_t stride;
  int num_ranks;
  int first_expert;

  __device__ Posted(const RouteParams& params, std::uint64_t epoch)
      : num_ranks(params.ranks.num_ranks),
        first_expert(plan::CountColumns::of(params.ranks.num_ranks, params.num_experts).first_expert) {
    const PostedSlot slot(params.ranks, epoch);
    headers = params.ranks.control.headers + slot.first_rank;
    counts = params.ranks.control.counts + slot.first_rank * slot.stride;
    stride = slot.stride;
  }
  /// Volatile: a peer wrote it while this kernel ran.
  __device__ std::int32_t count(int source, int column) const {
    return *static_cast<const volatile std::int32_t*>(counts + static_cast<std::size_t>(source) * stride + column);
  }
  /// Calls use(source, count) for every source in order; `exists` false: with counts of 0.
  template <typename Use>
  __device__ void for_each_source(int column, bool exists, Use use) const {
#pragma unroll 1
    for (int first = 0; first < num_ranks; first += kSourceBatch) {
      std::int32_t batch[kSourceBatch];
#pragma unroll
      for (int i = 0; i < kSourceBatch; ++i) {
        batch[i] = exists && first + i < num_ranks ? count(first + i, column) : 0;
      }
#pragma unroll
      for (int i = 0; i < kSourceBatch; ++i) {
        if (first + i < num_ranks) use(first + i, batch[i]);
      }
    }
  }
};

/// Copies the headers of all ranks to shared memory. All threads.
__device__ inline void load_headers(const Posted& posted, const Scratch& scratch) {
  constexpr int kWords = static_cast<int>(sizeof(CountsHeader) / sizeof(std::uint64_t));
  const auto* const from = reinterpret_cast<const volatile std::uint64_t*>(posted.headers);
  auto* const to = reinterpret_cast<std::uint64_t*>(scratch.headers);
  // By threads in the middle: the first and the last have loads of their own to wait for.
  constexpr int kFirst = kExchangeThreads / 2;
  const int thread = (static_cast<int>(threadIdx.x) + kFirst) % kExchangeThreads;
#pragma unroll 1
  for (int i = thread; i < posted.num_ranks * kWords; i += kExchangeThreads) to[i] = from[i];
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_INTRANODE_EXCHANGE_COUNTS_CUH
