#ifndef FERRY_CUDA_LATENCY_SMALL_PARTS_CUH
#define FERRY_CUDA_LATENCY_SMALL_PARTS_CUH

/// Parts shared by both halves of a latency_dispatch of a few tokens, which has a kernel of its own. To the peers it is
/// the same call as that of any other kernel. Each block sends at most one token, each warp receives one, a thread has
/// one expert and one entry; so nothing is counted in turns, and computations run while loads are on their way or in
/// all threads at once. Most of such a call's time is spent fetching code that the multiprocessor has not run yet, so
/// there is little of it, and no function call between a row and its place.

#include <cstddef>
#include <cstdint>

#include "cuda/latency/dispatch_receive.cuh"
#include "cuda/latency/send_rows.cuh"
#include "cuda/latency/turns.cuh"

namespace ferry::cuda::device {

/// Maximum number of tokens of a rank: each has a bit in an expert's word.
inline constexpr int kSmallTokens = 32;
// A thread loads an expert's counts of all ranks at once, and one GrantsLook covers their grants.
static_assert(kSmallRanks <= GrantsLook::kRanks);
/// Maximum number of experts: one per thread.
inline constexpr int kSmallExperts = kDispatchThreads;
/// Maximum number of entries: one per thread of all warps but the first.
inline constexpr int kSmallEntries = kRowThreads;

/// State of a block, in dynamic shared memory; the words of the experts follow, then the receive half's memory.
struct SmallShared {
  std::uint64_t number;  ///< number of the call; 0: the group broke
  unsigned long long bad_entry;
  unsigned other_call;                  ///< not 0: a rank makes another call
  int sets[kSmallRanks];                ///< set in which each rank receives the call
  std::byte* words[kSmallRanks];        ///< this rank's slot on each rank
  std::byte* rows[kSmallRanks];         ///< start of this rank's rows on each rank
  std::int32_t experts[kSmallEntries];  ///< [T, K] expert of each entry that counts; -1: none
  std::uint32_t scale_words[kStepBlocks];

  /// [E] bit t: this rank's token t has the expert.
  __device__ unsigned* tokens_of_expert() { return reinterpret_cast<unsigned*>(this + 1); }
  FERRY_HOST_DEVICE static constexpr std::size_t size_bytes(int num_experts) {
    return round_up_part(sizeof(SmallShared) + static_cast<std::size_t>(num_experts) * sizeof(unsigned));
  }
};

/// Ranks of the lanes' homes, one bit each. All lanes of a warp; home -1: none.
__device__ inline unsigned ranks_of(std::int32_t home) {
  return __reduce_or_sync(kAllLanes, home >= 0 ? 1U << home_rank(home) : 0U);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_SMALL_PARTS_CUH
