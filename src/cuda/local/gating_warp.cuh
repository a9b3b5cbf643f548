#ifndef FERRY_CUDA_LOCAL_GATING_WARP_CUH
#define FERRY_CUDA_LOCAL_GATING_WARP_CUH

/// A warp chooses the experts of a token. Lane l has the l-th run of ceil(E/32) consecutive experts, the order in which
/// sums over a row are made too, so that among equal keys the lowest lane has the lowest expert. The steps after a
/// choice (weights, stores) need few lanes per token, so a warp does them for several tokens together, each in a slot
/// of lanes. The rules, and the bits of the results, are those of numeric/gating.hpp.

#include <cstddef>
#include <cstdint>

#include "cuda/local/gating_entry.cuh"
#include "cuda/local/sort_network.cuh"
#include "cuda/sync/flags.cuh"
#include "numeric/gating.hpp"

namespace ferry::cuda::device {

/// A lane's entry among the choices that its warp is processing.
struct LaneChoice {
  int id = -1;
  float largest = 0;  ///< largest logit of the row; this and the sum are set only if weights need the whole row
  float row_sum = 1;
};

/// Experts of a lane.
template <int kRun>
struct LaneRow {
  float logits[kRun];          ///< NaN for places without an expert
  std::uint32_t keys[kRun];    ///< kClosedKey for places without an expert
  std::uint32_t sorted[kRun];  ///< keys of experts that may still be chosen, descending
};

__device__ inline std::uint32_t max_of_warp(std::uint32_t value) { return __reduce_max_sync(kAllLanes, value); }

__device__ inline float sum_of_warp(float value) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// Sum over the lanes of a slot. The remaining places of a sum over 32 are zeros and do not change it.
__device__ inline float sum_of_slot(float value, int slot_lanes) {
  for (int distance = slot_lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// Largest value over the lanes of a slot; -infinity if all are NaN.
__device__ inline float largest_of_slot(float value, int slot_lanes) {
  std::uint32_t key = numeric::selection_key(value);
  for (int distance = slot_lanes / 2; distance > 0; distance /= 2) {
    key = max(key, __shfl_xor_sync(kAllLanes, key, distance));
  }
  return numeric::score_of_key(key);
}

/// Largest value over the lanes of the warp; -infinity if all are NaN.
__device__ inline float largest_of_warp(float value) {
  return numeric::score_of_key(max_of_warp(numeric::selection_key(value)));
}

/// Expert at place `i` of this lane; at least num_experts for places past the end.
__device__ inline int expert_at(const GatingKernelParams& params, int i) {
  return i < params.run_length ? lane_idx() * params.run_length + i : params.gating.num_experts;
}

/// Number of experts of this lane.
__device__ inline int num_present_experts(const GatingKernelParams& params) {
  const int first = lane_idx() * params.run_length;
  return min(max(params.gating.num_experts - first, 0), params.run_length);
}

template <int kRun>
__device__ void load_logits(const GatingKernelParams& params, std::int64_t token, float (&logits)[kRun]) {
  const GatingParams& gating = params.gating;
  constexpr int kVector = 4;
  if constexpr (kRun % kVector == 0) {
    if (params.whole_runs) {
      const int first = lane_idx() * kRun;
      const std::int64_t at = token * gating.num_experts + first;
      const bool present = first < gating.num_experts;
#pragma unroll
      for (int i = 0; i < kRun; i += kVector) {
        uint4 words = {numeric::kFloatNan, numeric::kFloatNan, numeric::kFloatNan, numeric::kFloatNan};
        if (present && gating.is_bfloat16) {
          const auto* from = static_cast<const std::uint16_t*>(gating.logits) + at + i;
          const uint2 packed = *reinterpret_cast<const uint2*>(from);
          words = {packed.x << 16, packed.x & 0xFFFF0000U, packed.y << 16, packed.y & 0xFFFF0000U};
        } else if (present) {
          words = *reinterpret_cast<const uint4*>(static_cast<const float*>(gating.logits) + at + i);
        }
        logits[i] = numeric::float_of(words.x);
        logits[i + 1] = numeric::float_of(words.y);
        logits[i + 2] = numeric::float_of(words.z);
        logits[i + 3] = numeric::float_of(words.w);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int expert = expert_at(params, i);
    logits[i] = expert < gating.num_experts ? logit_at(gating, token, expert) : numeric::float_of(numeric::kFloatNan);
  }
}

/// Exponentials of a row, and their sum, or 1 if the sum is zero.
template <int kRun>
__device__ float exponentials_of_row(const float (&logits)[kRun], float largest, float (&exponentials)[kRun]) {
  float run = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    exponentials[i] = numeric::relative_exponential(logits[i], largest);
    run += exponentials[i];
  }
  const float sum = sum_of_warp(run);
  return sum == 0 ? 1.0F : sum;
}

template <int kRun>
__device__ float largest_logit(const float (&logits)[kRun]) {
  float largest = numeric::float_of(0x80000000U | numeric::kFloatInfinity);
#pragma unroll
  for (int i = 0; i < kRun; ++i) largest = logits[i] > largest ? logits[i] : largest;
  return largest_of_warp(largest);
}

/// Sets the keys from the logits.
template <int kRun>
__device__ void make_keys(const GatingKernelParams& params, std::int64_t token, const float (&bias)[kRun],
                          LaneRow<kRun>& row) {
  const GatingParams& gating = params.gating;
  const GatingOptions& options = gating.options;
  const bool has_bias = gating.bias != nullptr;
  float compared[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) compared[i] = row.logits[i];
  if (options.noise > 0) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) compared[i] = numeric::noisy(row.logits[i], options, token, expert_at(params, i));
  }
  float scores[kRun];
  if (numeric::selects_by_logit(options, has_bias)) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) scores[i] = compared[i];
  } else if (options.score == GatingScore::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) scores[i] = numeric::sigmoid(compared[i]);
  } else {
    const float sum = exponentials_of_row<kRun>(compared, largest_logit<kRun>(compared), scores);
#pragma unroll
    for (int i = 0; i < kRun; ++i) scores[i] = scores[i] / sum;
  }
  const int num_present = num_present_experts(params);
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (has_bias) scores[i] += bias[i];
    has_nan |= !(scores[i] == scores[i] && compared[i] == compared[i]);
  }
  // Most rows need no check for NaN: every lane has all of its experts, or none.
  const bool is_plain = num_present == 0 || (num_present == kRun && !has_nan);
  if (__all_sync(kAllLanes, is_plain)) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) row.keys[i] = num_present > 0 ? numeric::number_key(scores[i]) : kClosedKey;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    row.keys[i] = i < num_present ? numeric::selection_key(scores[i], compared[i]) : kClosedKey;
  }
}

template <int kRun>
__device__ void sort_keys(LaneRow<kRun>& row) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) row.sorted[i] = row.keys[i];
  sort_descending<kRun>(row.sorted);
}

/// Groups of whole lanes: closes the lanes whose group is not among the best.
template <int kRun>
__device__ void close_lanes(const GatingKernelParams& params, LaneRow<kRun>& row) {
  const GatingOptions& options = params.gating.options;
  const bool sums = options.group_score == GatingGroupScore::kBestTwo;
  std::uint32_t best = row.sorted[0];
  std::uint32_t second = kRun > 1 ? row.sorted[kRun > 1 ? 1 : 0] : kClosedKey;
  for (int distance = 1; distance < params.group_lanes; distance *= 2) {
    const std::uint32_t other_best = __shfl_xor_sync(kAllLanes, best, distance);
    const std::uint32_t other_second = __shfl_xor_sync(kAllLanes, second, distance);
    second = max(min(best, other_best), max(second, other_second));
    best = max(best, other_best);
  }
  const bool has_second = params.gating.num_experts > options.num_groups;
  const std::uint32_t own = numeric::group_key(best, second, sums, has_second);
  const int own_group = lane_idx() / params.group_lanes;
  // The lanes of a group share the comparisons with the other groups.
  int num_better = 0;
  for (int first = 0; first < options.num_groups; first += params.group_lanes) {
    const int group = first + lane_idx() % params.group_lanes;
    const std::uint32_t other = __shfl_sync(kAllLanes, own, group * params.group_lanes);
    const bool better = other > own || (other == own && group < own_group);
    num_better += group < options.num_groups && better ? 1 : 0;
  }
  for (int distance = 1; distance < params.group_lanes; distance *= 2) {
    num_better += __shfl_xor_sync(kAllLanes, num_better, distance);
  }
  if (num_better < options.num_selected_groups) return;
#pragma unroll
  for (int i = 0; i < kRun; ++i) row.sorted[i] = kClosedKey;
}

/// Groups of any size: closes experts through shared memory. `scratch` has one word per expert and per group.
template <int kRun>
__device__ void close_experts(const GatingKernelParams& params, LaneRow<kRun>& row, std::uint32_t* scratch) {
  const GatingOptions& options = params.gating.options;
  const int num_experts = params.gating.num_experts;
  const int group_size = num_experts / options.num_groups;
  const bool sums = options.group_score == GatingGroupScore::kBestTwo;
  std::uint32_t* const group_keys = scratch + num_experts;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int expert = expert_at(params, i);
    if (expert < num_experts) scratch[expert] = row.keys[i];
  }
  __syncwarp();
  for (int group = lane_idx(); group < options.num_groups; group += kWarpLanes) {
    std::uint32_t best = kClosedKey;
    std::uint32_t second = kClosedKey;
    for (int i = 0; i < group_size; ++i) {
      const std::uint32_t key = scratch[group * group_size + i];
      second = max(second, min(best, key));
      best = max(best, key);
    }
    group_keys[group] = numeric::group_key(best, second, sums, group_size > 1);
  }
  __syncwarp();
  // The keys have been read; their memory now holds whether each group is among the best.
  for (int group = lane_idx(); group < options.num_groups; group += kWarpLanes) {
    const std::uint32_t own = group_keys[group];
    int num_better = 0;
    for (int other = 0; other < options.num_groups; ++other) {
      const std::uint32_t key = group_keys[other];
      num_better += key > own || (key == own && other < group) ? 1 : 0;
    }
    scratch[group] = num_better < options.num_selected_groups ? 1 : 0;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int expert = expert_at(params, i);
    if (expert < num_experts && scratch[expert / group_size] == 0) row.keys[i] = kClosedKey;
  }
  __syncwarp();
}

/// Key of a lane's entry, and the lanes that had it first.
struct ChosenKey {
  std::uint32_t key = kClosedKey;
  unsigned holders = 1;
};

/// Takes the best key of the warp from the lowest lane that has it, as the entry of lane `taker`. Moves up the next
/// `num_kept` keys of that lane, as many as may still be chosen.
template <int kRun>
__device__ void take_best(LaneRow<kRun>& row, int taker, int num_kept, ChosenKey& own) {
  const std::uint32_t head = row.sorted[0];
  const std::uint32_t best = max_of_warp(head);
  const unsigned holders = __ballot_sync(kAllLanes, head == best);
  if (lane_idx() == taker) own = {best, holders};
  // The lowest of these lanes has the lowest expert.
  const unsigned lower_lanes = (1U << lane_idx()) - 1;
  const bool wins = head == best && (holders & lower_lanes) == 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const std::uint32_t next = i + 1 < kRun ? row.sorted[i + 1 < kRun ? i + 1 : 0] : kClosedKey;
    if (i < num_kept) row.sorted[i] = wins ? next : row.sorted[i];
  }
}

/// Place within lane `winner` of the key of this lane's entry.
template <int kRun>
__device__ int place_of_key(const LaneRow<kRun>& row, std::uint32_t own_key, int winner) {
  // Entries with the same key from the same lane are adjacent. An entry skips as many places with that key as there are
  // such entries before it.
  const std::uint32_t key_before = __shfl_up_sync(kAllLanes, own_key, 1);
  const int winner_before = __shfl_up_sync(kAllLanes, winner, 1);
  const bool is_open = own_key != kClosedKey;
  const bool repeats = lane_idx() > 0 && is_open && key_before == own_key && winner_before == winner;
  const unsigned all_repeats = __ballot_sync(kAllLanes, repeats);
  int place = 0;
  if (all_repeats == 0) {
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      if (__shfl_sync(kAllLanes, row.keys[i], winner) == own_key) place = i;
    }
    return place;
  }
  const unsigned own_and_lower = (2U << lane_idx()) - 1;
  int num_passed = lane_idx() - (kWarpLanes - 1 - __clz(static_cast<int>(~all_repeats & own_and_lower)));
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (__shfl_sync(kAllLanes, row.keys[i], winner) == own_key && num_passed-- == 0) place = i;
  }
  return place;
}

/// Chooses the best K in descending order: lane `first_lane` + k returns the id of the k-th; -1 if there are fewer, and
/// in all other lanes.
template <int kRun>
__device__ int choose_best(const GatingKernelParams& params, LaneRow<kRun>& row, int first_lane) {
  const int num_topk = params.gating.options.num_topk;
  constexpr int kUnrolled = 8;
  ChosenKey own;
  if (num_topk <= kUnrolled) {
#pragma unroll
    for (int k = 0; k < kUnrolled; ++k) {
      if (k < num_topk) take_best<kRun>(row, first_lane + k, kUnrolled - 1 - k, own);
    }
  } else {
    for (int k = 0; k < num_topk; ++k) take_best<kRun>(row, first_lane + k, kRun, own);
  }
  const int winner = __ffs(static_cast<int>(own.holders)) - 1;
  const int place = place_of_key<kRun>(row, own.key, winner);
  return own.key == kClosedKey ? -1 : winner * params.run_length + place;
}

/// Weight of this lane's entry, which belongs to token `token`; 0 without an expert. Each token has a slot of
/// `slot_lanes` lanes.
__device__ inline float weigh(const GatingParams& gating, std::int64_t token, const LaneChoice& choice,
                              int slot_lanes) {
  const GatingOptions& options = gating.options;
  const float none = numeric::float_of(0x80000000U | numeric::kFloatInfinity);
  const float logit = choice.id >= 0 ? logit_at(gating, token, choice.id) : none;
  float part = 0;
  if (options.score == GatingScore::kSigmoid) {
    part = numeric::sigmoid(logit);
  } else if (numeric::sum_of_row_cancels(options)) {
    part = numeric::relative_exponential(logit, largest_of_slot(logit, slot_lanes));
  } else {
    part = numeric::relative_exponential(logit, choice.largest) / choice.row_sum;
  }
  if (choice.id < 0) part = 0;
  return numeric::final_weight(part, sum_of_slot(part, slot_lanes), options);
}

template <int kRun>
__device__ void load_bias(const GatingKernelParams& params, float (&bias)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int expert = expert_at(params, i);
    bias[i] = params.gating.bias != nullptr && expert < params.gating.num_experts ? params.gating.bias[expert] : 0.0F;
  }
}

/// Sets the entries of the K lanes starting with `first_lane`. `is_closed(i)`: the expert at place i of this lane must
/// not be chosen.
template <int kRun, typename IsClosed>
__device__ void choose(const GatingKernelParams& params, std::int64_t token, int first_lane, const float (&bias)[kRun],
                       std::uint32_t* scratch, IsClosed is_closed, LaneChoice& choice) {
  LaneRow<kRun> row;
  load_logits<kRun>(params, token, row.logits);
  make_keys<kRun>(params, token, bias, row);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i < params.run_length && is_closed(i)) row.keys[i] = kClosedKey;
  }
  const GatingOptions& options = params.gating.options;
  const bool is_own = lane_idx() >= first_lane && lane_idx() < first_lane + options.num_topk;
  if (options.score == GatingScore::kSoftmax && !numeric::sum_of_row_cancels(options)) {
    const float largest = largest_logit<kRun>(row.logits);
    float exponentials[kRun];
    const float sum = exponentials_of_row<kRun>(row.logits, largest, exponentials);
    if (is_own) {
      choice.largest = largest;
      choice.row_sum = sum;
    }
  }
  const bool limited = numeric::is_group_limited(options);
  if (limited && params.group_lanes == 0) close_experts<kRun>(params, row, scratch);
  sort_keys<kRun>(row);
  if (limited && params.group_lanes > 0) close_lanes<kRun>(params, row);
  const int id = choose_best<kRun>(params, row, first_lane);
  if (is_own) choice.id = id;
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_GATING_WARP_CUH
