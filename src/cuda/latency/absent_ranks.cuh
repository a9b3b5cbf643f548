#ifndef FERRY_CUDA_LATENCY_ABSENT_RANKS_CUH
#define FERRY_CUDA_LATENCY_ABSENT_RANKS_CUH

/// Ranks without a process (GroupOptions::present_ranks) in groups that do not mask ranks. The host writes who they are
/// before the first call, so that a call costs nothing more while all are present.
///
/// Where a token's entries are sent, its picks of experts of absent ranks are dropped; counts include them, so they
/// take room in slabs as the picks of masked ranks do. Where experts may have several homes, tokens pick among those
/// that are present, and lost picks are not counted. An absent rank grants no set, so it gets headers alone, in memory
/// that stands for its own. Each rank posts to itself the words that the absent one would send.

#include <cstdint>

#include "cuda/latency/turns.cuh"
#include "cuda/placement/pick.cuh"

namespace ferry::cuda::device {

/// Number of absent ranks. Load it along with words that are waited for anyway, and compare it only where it is used: a
/// comparison waits for the load.
__device__ inline std::uint32_t load_num_absent(const LatencyParams& call) {
  return static_cast<const volatile LatencyLocal&>(local_of(call)).num_absent;
}

__device__ inline bool is_absent(const LatencyParams& call, int rank) {
  constexpr int kBits = 32;
  return (local_of(call).absent[rank / kBits] >> (rank % kBits) & 1U) != 0;
}

/// Stands for an expert that a token has picked and that no rank has; its own inverse.
__device__ inline int lost_expert(int expert) { return -2 - expert; }

/// Home of a logical expert that the token picks among those of ranks that are present; lost if there is none; -1 if it
/// has no home at all.
__device__ inline int pick_present_home(const DispatchSendParams& params, int logical, std::int64_t token) {
  const LatencyParams& call = params.call;
  const HomeTables& table = params.placement.homes;
  const plan::HomeRange range = table.ranges[logical];
  const auto is_here = [&](std::uint32_t i) {
    return !is_absent(call, params.placement.owner[table.homes[range.first + i]]);
  };
  std::uint32_t num_left = 0;
  for (std::uint32_t i = 0; i < range.count; ++i) num_left += is_here(i) ? 1 : 0;
  if (num_left == 0) {
    const int home = pick_home(table.ranges, table.homes, logical, token, call.ranks.rank);
    return home < 0 ? -1 : lost_expert(home);
  }
  std::uint32_t pick = num_left == 1 ? 0 : plan::pick_of(num_left, token, call.ranks.rank);
  std::uint32_t i = 0;
  while (!is_here(i) || pick-- != 0) ++i;
  return table.homes[range.first + i];
}

/// pick_expert() where some ranks are absent; lost_expert() if the pick is lost. Not inlined: other groups run none of
/// it.
__device__ __noinline__ inline int pick_present_expert(const DispatchSendParams& params, std::int64_t token,
                                                       std::int64_t id) {
  const PlacementTables& placement = params.placement;
  if (id < 0 || id >= num_named_experts(placement, params.call.num_experts)) return -1;
  const auto expert = static_cast<int>(id);
  if (placement.homes.ranges != nullptr) return pick_present_home(params, expert, token);
  return is_absent(params.call, placement.owner[expert]) ? lost_expert(expert) : expert;
}

/// Posts to this rank what absent ranks would send in call `number`, which it receives in `set`, and that they have no
/// set for the next call. All lanes of one warp, before any block waits for these words. `homes_hash`: hash_of_homes()
/// of a dispatch.
__device__ __noinline__ inline void post_for_absent(const LatencyParams& call, LatencyKind kind, std::uint64_t number,
                                                    int set, std::uint64_t homes_hash) {
  const int me = call.ranks.rank;
  const int lane = lane_idx();
  LatencyHeader header;
  header.agreement = call.agreement;
  header.record_number = kMaskedRecord;
  header.blocks_or_homes = homes_hash;
#pragma unroll 1
  for (int rank = 0; rank < call.ranks.num_ranks; ++rank) {
    if (!is_absent(call, rank)) continue;
    if (lane < kLatencyHeaderWords) {
      post_word(header_words(call, me, kind, set, rank) + lane, number,
                reinterpret_cast<const std::uint32_t*>(&header)[lane]);
    }
    if (lane == 0) post_word(grant_word(call, me, kind, rank, number + 1), number + 1, kNoSet);
    if (kind != LatencyKind::kDispatch || set == kNoSet) continue;
    std::uint64_t* const counts = count_words(call, me, set, rank);
#pragma unroll 1
    for (int expert = lane; expert < call.num_experts; expert += kWarpLanes) post_word(counts + expert, number, 0);
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LATENCY_ABSENT_RANKS_CUH
