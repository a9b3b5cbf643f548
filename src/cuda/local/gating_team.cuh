#ifndef FERRY_CUDA_LOCAL_GATING_TEAM_CUH
#define FERRY_CUDA_LOCAL_GATING_TEAM_CUH

/// A warp chooses the experts of several tokens together: each token has a team of kTeam lanes, and each lane a slice
/// of kSlice consecutive experts. The tokens share the work whose cost to a warp does not depend on the number of
/// experts per lane: finding the K best, the weights, the stores. The rules, and the bits of the results, are those of
/// numeric/gating.hpp.
///
/// Each lane sorts its slice down to the best kKept keys. The keys of a team's lanes are merged pairwise, which yields
/// the K-th best key. Each lane then finds which of its experts reach that key.

#include <cstddef>
#include <cstdint>

#include "cuda/local/gating_warp.cuh"
#include "cuda/sync/shared_memory.cuh"

namespace ferry::cuda::device {

/// Keys of a sorted run; K is at most this number.
inline constexpr int kKept = 8;
/// Experts moved between shared memory and registers by one instruction.
inline constexpr int kVector = 4;
/// A sum of squares below this limit shows that no logit is NaN, infinite, or so large that its exponential is 0.
inline constexpr float kPlainSquares = numeric::kExponentialFloor * numeric::kExponentialFloor;

using KeptKeys = std::uint32_t[kKept];

/// Words of a slice in shared memory: an odd number of 16-byte words, so that the lanes' slices start in different
/// banks.
template <int kSlice>
inline constexpr int kSliceWords = kSlice + kVector;

/// Position of an expert in a stage or among the biases.
template <int kSlice>
__device__ int slice_place(int expert) {
  return expert + static_cast<int>(static_cast<unsigned>(expert) / kSlice) * kVector;
}

template <int kTeam>
__device__ int team_lane() {
  return lane_idx() & (kTeam - 1);
}

/// Sum over the lanes of the team up to this one.
template <int kTeam>
__device__ int running_sum(int value) {
#pragma unroll
  for (int distance = 1; distance < kTeam; distance *= 2) {
    const int lower = __shfl_up_sync(kAllLanes, value, distance);
    if (team_lane<kTeam>() >= distance) value += lower;
  }
  return value;
}

/// Position in the warp's stage of this lane's `load`-th vector of `kValues` experts.
template <int kSlice, int kValues>
__device__ int stage_place(int load) {
  constexpr int kLoaded = kWarpLanes * kValues;
  if constexpr (kLoaded % kSlice == 0) {
    return load * (kLoaded / kSlice * kSliceWords<kSlice>)+slice_place<kSlice>(lane_idx() * kValues);
  } else {
    return slice_place<kSlice>(load * kLoaded + lane_idx() * kValues);
  }
}

/// Loads kLoads vectors per lane, of the first `num_words` vectors; zeros after them.
template <int kLoads>
__device__ void load_words(const std::byte* from, int num_words, uint4 (&words)[kLoads]) {
  const auto* const own = reinterpret_cast<const uint4*>(from) + lane_idx();
  if (num_words == kLoads * kWarpLanes) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) words[i] = own[i * kWarpLanes];
    return;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    words[i] = i * kWarpLanes + lane_idx() < num_words ? own[i * kWarpLanes] : uint4{0, 0, 0, 0};
  }
}

/// Copies the logits of `num_tokens` tokens, at most one per team, starting at `from`, to the warp's stage.
template <int kTeam, int kSlice>
__device__ void stage_logits(bool is_bfloat16, const std::byte* from, int num_tokens, float* stage) {
  const int count = num_tokens * kTeam * kSlice;
  if (is_bfloat16) {
    constexpr int kValues = 2 * kVector;
    uint4 words[kSlice / kValues];
    load_words(from, count / kValues, words);
#pragma unroll
    for (int i = 0; i < kSlice / kValues; ++i) {
      auto* const to = reinterpret_cast<uint4*>(stage + stage_place<kSlice, kValues>(i));
      const uint4 word = words[i];
      to[0] = {word.x << 16, word.x & 0xFFFF0000U, word.y << 16, word.y & 0xFFFF0000U};
      to[1] = {word.z << 16, word.z & 0xFFFF0000U, word.w << 16, word.w & 0xFFFF0000U};
    }
    return;
  }
  uint4 words[kSlice / kVector];
  load_words(from, count / kVector, words);
#pragma unroll
  for (int i = 0; i < kSlice / kVector; ++i) {
    *reinterpret_cast<uint4*>(stage + stage_place<kSlice, kVector>(i)) = words[i];
  }
}

__device__ inline void load_kept(const float* from, float (&values)[kKept]) {
#pragma unroll
  for (int i = 0; i < kKept; i += kVector) {
    const float4 words = *reinterpret_cast<const float4*>(from + i);
    values[i] = words.x;
    values[i + 1] = words.y;
    values[i + 2] = words.z;
    values[i + 3] = words.w;
  }
}

/// A lane's part of its block's shared memory.
struct TeamPlace {
  const float* bias = nullptr;  ///< biases of the lane's slice
  bool plain_bias = false;      ///< all biases are small, as kPlainSquares defines for logits
  float* stage = nullptr;       ///< stage of the warp
  float* token = nullptr;       ///< the team's part of the stage
  float* slice = nullptr;       ///< the lane's part of the stage
  int* ids = nullptr;           ///< kKept words of the team
};

/// Computes the keys of a lane's next experts. All lanes of a warp take the same branch.
__device__ inline void make_kept_keys(bool by_sigmoid, bool plain_bias, const float (&logits)[kKept],
                                      const float (&bias)[kKept], KeptKeys& keys) {
  float squares[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    squares[i % 2] = numeric::fused_multiply_add(logits[i], logits[i], squares[i % 2]);
  }
  if (__all_sync(kAllLanes, plain_bias && squares[0] + squares[1] < kPlainSquares)) {
    float scores[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) scores[i] = logits[i];
    if (by_sigmoid) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) scores[i] = numeric::sigmoid_above_floor(logits[i]);
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) keys[i] = numeric::key_of_bits(numeric::bits_of(scores[i] + bias[i]));
    return;
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float score = by_sigmoid ? numeric::sigmoid(logits[i]) : logits[i];
    keys[i] = numeric::selection_key(score + bias[i], logits[i]);
  }
}

/// Merges two descending runs and keeps the best keys, in descending order.
__device__ inline void merge_kept(KeptKeys& keys, const KeptKeys& others) {
#pragma unroll
  for (int i = 0; i < kKept; ++i) keys[i] = max(keys[i], others[kKept - 1 - i]);
    // The sequence is now bitonic.
#pragma unroll
  for (int distance = kKept / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if ((i & distance) == 0) {
        const std::uint32_t larger = max(keys[i], keys[i + distance]);
        keys[i + distance] = min(keys[i], keys[i + distance]);
        keys[i] = larger;
      }
    }
  }
}

/// Replaces the lane's logits from `first` on by keys, and returns these keys in descending order.
__device__ inline void take_keys(bool by_sigmoid, const TeamPlace& place, int first, KeptKeys& keys) {
  float logits[kKept];
  float bias[kKept];
  load_kept(place.slice + first, logits);
  load_kept(place.bias + first, bias);
  make_kept_keys(by_sigmoid, place.plain_bias, logits, bias, keys);
#pragma unroll
  for (int i = 0; i < kKept; i += kVector) {
    *reinterpret_cast<uint4*>(place.slice + first + i) = {keys[i], keys[i + 1], keys[i + 2], keys[i + 3]};
  }
  sort_descending<kKept>(keys);
}

/// Replaces the lane's logits by keys and returns the best of them.
template <int kSlice>
__device__ void sort_slice(bool by_sigmoid, const TeamPlace& place, KeptKeys& best) {
  take_keys(by_sigmoid, place, 0, best);
#pragma unroll 1
  for (int first = kKept; first < kSlice; first += kKept) {
    KeptKeys next;
    take_keys(by_sigmoid, place, first, next);
    merge_kept(best, next);
  }
}

/// Whether the key of the lane at distance `mask` (by xor) precedes this lane's key, which is not the closed one. Lanes
/// are in the order of experts, so among equal keys the lower lane's precedes.
__device__ inline bool goes_first(std::uint32_t other, std::uint32_t own, int mask) {
  const int highest = static_cast<int>(0x80000000U >> __clz(mask));
  const bool is_lower = (lane_idx() & highest) != 0;
  return other > own - (is_lower ? 1 : 0);
}

/// Whether this lane's group is among the best.
template <int kTeam>
__device__ bool in_selected_group(const GatingKernelParams& params, const KeptKeys& keys) {
  const GatingOptions& options = params.gating.options;
  const bool sums = options.group_score == GatingGroupScore::kBestTwo;
  std::uint32_t best = keys[0];
  std::uint32_t second = keys[1];
  for (int distance = 1; distance < params.group_lanes; distance *= 2) {
    const std::uint32_t other_best = __shfl_xor_sync(kAllLanes, best, distance);
    const std::uint32_t other_second = __shfl_xor_sync(kAllLanes, second, distance);
    second = max(min(best, other_best), max(second, other_second));
    best = max(best, other_best);
  }
  const std::uint32_t own = numeric::group_key(best, second, sums, true);
  int num_better = 0;
#pragma unroll
  for (int mask = 1; mask < kTeam; ++mask) {
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, own, mask);
    if ((mask & (params.group_lanes - 1)) == 0) num_better += goes_first(other, own, mask) ? 1 : 0;
  }
  return num_better < options.num_selected_groups;
}

/// Bits of the experts of a slice whose keys are at least `least`.
template <int kSlice>
__device__ unsigned experts_from(const float* slice, std::uint32_t least) {
  unsigned experts = 0;
#pragma unroll
  for (int first = 0; first < kSlice; first += kVector) {
    const uint4 keys = *reinterpret_cast<const uint4*>(slice + first);
    if (keys.x >= least) experts |= 1U << first;
    if (keys.y >= least) experts |= 2U << first;
    if (keys.z >= least) experts |= 4U << first;
    if (keys.w >= least) experts |= 8U << first;
  }
  return experts;
}

/// Bits of some experts of this lane's slice, and their number over the team's lanes up to this one.
struct TeamExperts {
  unsigned own = 0;
  int running = 0;
  int total = 0;
};

template <int kTeam>
__device__ TeamExperts count_experts(unsigned own) {
  const int running = running_sum<kTeam>(__popc(own));
  return {own, running, __shfl_sync(kAllLanes, running, lane_idx() | (kTeam - 1))};
}

/// Experts of a team with the best K keys. `kept`: the best keys of this lane; a closed lane has none.
template <int kTeam, int kSlice>
__device__ TeamExperts best_experts(int num_topk, const float* slice, KeptKeys& kept) {
  const bool is_open = kept[0] != kClosedKey;
#pragma unroll
  for (int distance = 1; distance < kTeam; distance *= 2) {
    KeptKeys others;
#pragma unroll
    for (int i = 0; i < kKept; ++i) others[i] = __shfl_xor_sync(kAllLanes, kept[i], distance);
    merge_kept(kept, others);
  }
  std::uint32_t last = kept[0];
#pragma unroll
  for (int i = 1; i < kKept; ++i) last = i < num_topk ? kept[i] : last;
  const TeamExperts reach = count_experts<kTeam>(is_open ? experts_from<kSlice>(slice, last) : 0);
  if (__all_sync(kAllLanes, reach.total == num_topk)) return reach;
  // More experts than wanted have the last key, and the lowest of them win; or too few experts exist, and the last key
  // is the closed one.
  const unsigned above = is_open ? experts_from<kSlice>(slice, last + 1) : 0;
  const TeamExperts equal = count_experts<kTeam>(reach.own & ~above);
  const int wanted = last == kClosedKey ? 0 : num_topk - (reach.total - equal.total);
  unsigned kept_equal = 0;
  unsigned rest = equal.own;
  for (int passed = equal.running - __popc(equal.own); rest != 0 && passed < wanted; ++passed) {
    kept_equal |= rest & (0U - rest);
    rest &= rest - 1;
  }
  return count_experts<kTeam>(above | kept_equal);
}

/// Id that lane k of a team stores as its token's entry k; -1 if there is none. `ids`: kKept words of the team; `keys`:
/// keys of its token.
template <int kTeam, int kSlice>
__device__ int order_experts(const TeamExperts& experts, const float* keys, int* ids) {
  int slot = experts.running - __popc(experts.own);
  for (unsigned rest = experts.own; rest != 0; rest &= rest - 1) {
    ids[slot++] = team_lane<kTeam>() * kSlice + __ffs(static_cast<int>(rest)) - 1;
  }
  __syncwarp();
  const int own = team_lane<kTeam>();
  const int id = own < experts.total ? ids[own] : -1;
  const std::uint32_t key = id < 0 ? kClosedKey : numeric::bits_of(keys[slice_place<kSlice>(id)]);
  // Ids ascend with the lanes, so among equal keys lower lanes come first.
  int num_better = 0;
#pragma unroll
  for (int mask = 1; mask < kKept; ++mask) {
    const std::uint32_t other = __shfl_xor_sync(kAllLanes, key, mask);
    num_better += goes_first(other, key, mask) ? 1 : 0;
  }
  __syncwarp();
  if (id >= 0) ids[num_better] = id;
  __syncwarp();
  return own < experts.total ? ids[own] : -1;
}

/// Words of shared memory: the biases, then a stage and ids for each warp.
template <int kTeam, int kSlice>
struct TeamWords {
  static constexpr int kBias = kTeam * kSliceWords<kSlice>;
  static constexpr int kStage = kWarpLanes * kSliceWords<kSlice>;
  static constexpr int kIds = kWarpLanes / kTeam * kKept;
  static constexpr int of_block(int num_warps) { return kBias + num_warps * (kStage + kIds); }
};

template <int kTeam, int kSlice>
__device__ TeamPlace stage_bias(const GatingParams& gating, int num_warps) {
  using Words = TeamWords<kTeam, kSlice>;
  auto* const bias = reinterpret_cast<float*>(dynamic_shared());
#pragma unroll 1
  for (int expert = static_cast<int>(threadIdx.x); expert < kTeam * kSlice; expert += num_warps * kWarpLanes) {
    // Adding 0 turns a negative zero into a positive one, so that its sum with a score is never a negative zero.
    bias[slice_place<kSlice>(expert)] = gating.bias != nullptr ? gating.bias[expert] + 0.0F : 0.0F;
  }
  __syncthreads();
  TeamPlace place;
  const int team = lane_idx() / kTeam;
  place.bias = bias + team_lane<kTeam>() * kSliceWords<kSlice>;
  place.stage = bias + Words::kBias + warp_idx() * Words::kStage;
  place.token = place.stage + team * Words::kBias;
  place.slice = place.stage + lane_idx() * kSliceWords<kSlice>;
  place.ids =
      reinterpret_cast<int*>(bias + Words::kBias + num_warps * Words::kStage + warp_idx() * Words::kIds) + team * kKept;
  float squares = 0;
  for (int i = 0; i < kSlice; ++i) squares = numeric::fused_multiply_add(place.bias[i], place.bias[i], squares);
  place.plain_bias = squares < kPlainSquares;
  return place;
}

/// Chooses, weighs and stores the experts of `num_tokens` tokens, at most one per team, whose logits are at `logits`.
template <int kTeam, int kSlice>
__device__ void gate_in_teams(const GatingKernelParams& params, std::int64_t first_token, int num_tokens,
                              const std::byte* logits, const TeamPlace& place) {
  const GatingParams& gating = params.gating;
  const GatingOptions& options = gating.options;
  stage_logits<kTeam, kSlice>(gating.is_bfloat16, logits, num_tokens, place.stage);
  __syncwarp();
  const bool by_sigmoid =
      options.score == GatingScore::kSigmoid && !numeric::selects_by_logit(options, gating.bias != nullptr);
  KeptKeys kept;
  sort_slice<kSlice>(by_sigmoid, place, kept);
  if (numeric::is_group_limited(options) && !in_selected_group<kTeam>(params, kept)) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = kClosedKey;
  }
  const TeamExperts experts = best_experts<kTeam, kSlice>(options.num_topk, place.slice, kept);
  const int team = lane_idx() / kTeam;
  const std::int64_t token = first_token + team;
  const bool has_token = team < num_tokens;
  LaneChoice choice;
  choice.id = order_experts<kTeam, kSlice>(experts, place.token, place.ids);
  if (!has_token) choice.id = -1;
  const float weight = weigh(gating, token, choice, kTeam);
  if (has_token && team_lane<kTeam>() < options.num_topk) {
    store_entry(gating, {token, team_lane<kTeam>()}, choice.id, weight);
  }
  __syncwarp();  // all lanes have read the stage and the ids
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_GATING_TEAM_CUH
