#ifndef FERRY_CUDA_LATENCY_RECEIVE_COUNTS_CUH
#define FERRY_CUDA_LATENCY_RECEIVE_COUNTS_CUH

/// First rows in the slabs, from the counts of all ranks: rows of an expert are in order of (source, token).

#include <cstddef>
#include <cstdint>

#include "cuda/latency/words.cuh"

namespace ferry::cuda::device {

inline constexpr unsigned kNone = 0xFFFFFFFFU;

/// Tables of the experts in a block of the receive half.
struct ExpertTables {
  std::int32_t* homes = nullptr;       ///< [E] home_of each
  std::int32_t* bases = nullptr;       ///< [E] number of rows before those of one source
  std::int32_t* local_rows = nullptr;  ///< [L] number of rows of this rank's experts
  std::size_t size_bytes = 0;

  FERRY_HOST_DEVICE static constexpr ExpertTables at(std::byte* base, int num_experts, int num_local_experts) {
    plan::Carver carver(base);
    ExpertTables tables;
    tables.homes = carver.take<std::int32_t>(static_cast<std::size_t>(num_experts));
    tables.bases = carver.take<std::int32_t>(static_cast<std::size_t>(num_experts));
    tables.local_rows = carver.take<std::int32_t>(static_cast<std::size_t>(num_local_experts));
    tables.size_bytes = carver.used_bytes();
    return tables;
  }
};

/// The same in groups of several nodes, where what comes from other nodes is checked. Kernels for one node hold none of
/// that code.
struct CheckedExpertTables : ExpertTables {
  std::int32_t* counts = nullptr;  ///< [E] number of rows of that source
};

/// Findings of a block about the ranks.
struct ReceiveShared {
  std::int32_t tokens[kMaxRanks];  ///< T of each
  unsigned first_bad_rank;         ///< first rank with an id that is no expert; kNone: none
  /// First rank with another placement than this rank's, for placements in GPU memory; kNone: none
  unsigned first_other_rank;
  unsigned first_full_expert;     ///< first expert that gets more rows than its slab has; kNone: none
  unsigned from_rank[kMaxRanks];  ///< rows here from each source; only in the block that reports
  unsigned to_rank[kMaxRanks];    ///< rows from here on each rank; only in the block that reports
};

/// Both structs, in dynamic shared memory from `base`.
struct ReceiveMemory {
  ReceiveShared* shared = nullptr;
  ExpertTables experts;
  std::size_t size_bytes = 0;

  FERRY_HOST_DEVICE static constexpr ReceiveMemory at(std::byte* base, int num_experts, int num_local_experts) {
    plan::Carver carver(base);
    ReceiveMemory memory;
    memory.shared = carver.take<ReceiveShared>(1);
    const std::size_t used_bytes = carver.used_bytes();
    memory.experts = ExpertTables::at(base == nullptr ? nullptr : base + used_bytes, num_experts, num_local_experts);
    memory.size_bytes = used_bytes + memory.experts.size_bytes;
    return memory;
  }
};

/// Uses of the counts while they are added up.
struct CountsUse {
  int source = -1;                 ///< source whose first rows go to ExpertTables::bases
  std::int32_t* ranges = nullptr;  ///< [L, R, 2] in the block that reports, which also sums up by rank; else null
};

/// Counts of one expert, loaded before it is known whether there will be any: usually they have arrived.
struct CountsLook {
  static constexpr int kLoads = 4;  // in flight together
  std::uint64_t words[kLoads] = {};

  /// `first`: first source of the words.
  __device__ void load(const LatencyParams& call, const std::uint64_t* counts, int expert, int first) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first + i < call.ranks.num_ranks) {
        words[i] = load_relaxed_system(counts + (first + i) * static_cast<int>(kMaxExperts) + expert);
      }
    }
  }

  /// Whether the counts of the first `num_sources` have arrived.
  __device__ bool are_of(int num_sources, std::uint64_t number) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) all = all && (i >= num_sources || is_word_of(words[i], number));
    return all;
  }
};

/// Waits for the missing counts, at `counts` of the first source; false when the group broke.
__device__ __noinline__ inline bool await_counts(const LatencyParams& call, std::uint64_t number,
                                                 const std::uint64_t* counts, int first, CountsLook& look) {
  bool came = true;
#pragma unroll 1
  for (int i = 0; i < CountsLook::kLoads && first + i < call.ranks.num_ranks; ++i) {
    const Payload count = wait_payload(call, {Awaited::kCounts, first + i, number},
                                       counts + i * static_cast<int>(kMaxExperts), look.words[i]);
    look.words[i] = make_word(number, count.value);
    came = came && count.came;
  }
  return came;
}

/// Notes the counts of one expert, of sources from `first` on, in the block that reports. `before`: rows of the sources
/// before them.
__device__ __noinline__ inline void note_counts(const RankParams& ranks, ReceiveShared& shared, std::int32_t* ranges,
                                                int home, int first, CountsLook look, std::int32_t before) {
#pragma unroll 1
  for (int i = 0; i < CountsLook::kLoads && first + i < ranks.num_ranks; ++i) {
    const int source = first + i;
    const std::uint32_t count = payload_of(look.words[i]);
    if (source == ranks.rank) atomicAdd(&shared.to_rank[home_rank(home)], count);
    if (home_rank(home) != ranks.rank) continue;
    atomicAdd(&shared.from_rank[source], count);
    std::int32_t* range = ranges + (std::int64_t{home_expert(home)} * ranks.num_ranks + source) * 2;
    range[0] = static_cast<std::int32_t>(count);
    range[1] = before;
    before += static_cast<std::int32_t>(count);
  }
}

/// Waits for the counts of all ranks and adds them up. `look`: counts of the first sources for the expert with this
/// thread's index. Experts: ExpertTables or CheckedExpertTables. All threads of a block; false in all of them when the
/// group broke.
template <typename Experts>
__device__ inline bool sum_counts(const LatencyParams& call, const SentCall& sent, const Experts& experts,
                                  ReceiveShared& shared, const CountsUse& use, const CountsLook& look) {
  constexpr int kLoads = CountsLook::kLoads;
  const int num_ranks = call.ranks.num_ranks;
  const std::uint64_t* const words = count_words(call, call.ranks.rank, static_cast<int>(sent.set), 0);
  bool came = true;
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < call.num_experts && came;
       expert += static_cast<int>(blockDim.x)) {
    const std::int32_t home = experts.homes[expert];
    std::int32_t rows = 0;
#pragma unroll 1
    for (int first = 0; first < num_ranks && came; first += kLoads) {
      CountsLook seen;
      if (first == 0 && expert == static_cast<int>(threadIdx.x)) {
        seen = look;
      } else {
        seen.load(call, words, expert, first);
      }
      if (!seen.are_of(num_ranks - first, sent.number)) [[unlikely]] {
        CountsLook late = seen;
        came = await_counts(call, sent.number, words + first * static_cast<int>(kMaxExperts) + expert, first, late);
        seen = late;
      }
      if (use.ranges != nullptr) note_counts(call.ranks, shared, use.ranges, home, first, seen, rows);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const auto count = static_cast<std::int32_t>(payload_of(seen.words[i]));  // 0 if there is no such source
        if (first + i == use.source) experts.bases[expert] = rows;
        if constexpr (requires { experts.counts; }) {
          if (first + i == use.source) experts.counts[expert] = count;
        }
        rows += count;
      }
    }
    if (home_rank(home) == call.ranks.rank) experts.local_rows[home_expert(home)] = rows;
    if (rows > call.slab_capacity) atomicMin(&shared.first_full_expert, static_cast<unsigned>(expert));
  }
  return __syncthreads_and(static_cast<int>(came)) != 0;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_RECEIVE_COUNTS_CUH
