#ifndef FERRY_CUDA_LATENCY_SMALL_PARTS_CUH
#define FERRY_CUDA_LATENCY_SMALL_PARTS_CUH

/// latency_dispatch of a few tokens, in a kernel of its own: what its halves share. To the peers it is the same call as
/// that of any other kernel. Here each block sends one token at most, each warp receives one, a thread has one expert
/// and one entry; so nothing is counted in turns, and what has to be computed is done while loads are on their way or
/// by all threads at once. Most of the time of such a call goes by while code comes that a multiprocessor has not run
/// yet, so there is little of it, and no function between a row and its place.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/send_rows.cuh"
#include "cuda/latency/turns.cuh"

namespace ferry::cuda::device {

/// Tokens of a rank: each has a bit of an expert's word.
inline constexpr int kSmallTokens = 32;
/// Ranks: a thread loads an expert's counts of all at once. The grants of as many are one look (GrantsLook).
inline constexpr int kSmallRanks = 8;
static_assert(kSmallRanks <= GrantsLook::kRanks);
/// Every thread has one.
inline constexpr int kSmallExperts = kDispatchThreads;
/// Every thread but those of the first warp.
inline constexpr int kSmallEntries = kRowThreads;

/// What a block knows, in dynamic shared memory; the words of the experts follow, then what receive halves have.
struct SmallShared {
  std::uint64_t number;  ///< of the call; 0: the group broke
  unsigned long long bad_entry;
  unsigned other_call;                  ///< not 0: a rank makes another one
  int sets[kSmallRanks];                ///< in which each rank receives
  std::byte* words[kSmallRanks];        ///< this rank's slot there
  std::byte* rows[kSmallRanks];         ///< where this rank's rows begin there
  std::int32_t experts[kSmallEntries];  ///< [T, K] of each entry that counts; -1: none
  std::uint32_t scale_words[kStepBlocks];

  /// [E] bit t: this rank's token t is for the expert.
  __device__ unsigned* tokens_of_expert() { return reinterpret_cast<unsigned*>(this + 1); }
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(int num_experts) {
    return round_up_part(sizeof(SmallShared) + static_cast<std::size_t>(num_experts) * sizeof(unsigned));
  }
};

/// The ranks of the lanes' homes, a bit each. All lanes of a warp; -1: no home.
__device__ inline unsigned ranks_of(std::int32_t home) {
  return __reduce_or_sync(kAllLanes, home >= 0 ? 1U << home_rank(home) : 0U);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SMALL_PARTS_CUH
