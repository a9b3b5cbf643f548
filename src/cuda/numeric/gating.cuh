#ifndef FERRY_CUDA_NUMERIC_GATING_CUH
#define FERRY_CUDA_NUMERIC_GATING_CUH

/// A warp that chooses the experts of a token: lane l has the l-th run of ceil(E/32) consecutive experts, which is also
/// how sums over a row are made, so that the lowest lane among equals has the lowest expert. The rules and their bits
/// are those of numeric/gating.hpp.

#include <cstddef>
#include <cstdint>

#include "cuda/numeric/sort_network.cuh"
#include "cuda/sync/memory_order.cuh"
#include "numeric/gating.hpp"

namespace ferry::cuda::device {

using numeric::GatingParams;
using numeric::kClosedKey;

struct GatingKernelParams {
  GatingParams gating;
  int run_length = 1;       ///< experts of a lane, at most kRun
  bool whole_runs = false;  ///< each lane has run_length = kRun experts or none, which can be loaded four at a time
  int group_lanes = 0;      ///< lanes of a group, a power of two, if groups are whole lanes of one warp; else 0
};

/// A lane's experts.
template <int kRun>
struct LaneRow {
  float logits[kRun];          ///< NaN where there is no expert
  std::uint32_t keys[kRun];    ///< kClosedKey where there is no expert
  std::uint32_t sorted[kRun];  ///< keys of those that may be chosen, descending
};

__device__ inline std::uint32_t max_of_warp(std::uint32_t value) { return __reduce_max_sync(kAllLanes, value); }

__device__ inline float sum_of_warp(float value) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// -infinity if all are NaN.
__device__ inline float largest_of_warp(float value) {
  return numeric::score_of_key(max_of_warp(numeric::selection_key(value)));
}

__device__ inline float logit_at(const GatingParams& params, std::int64_t token, int expert) {
  const std::int64_t at = token * params.num_experts + expert;
  if (!params.is_bfloat16) return static_cast<const float*>(params.logits)[at];
  return numeric::float_from_bfloat16(static_cast<const std::uint16_t*>(params.logits)[at]);
}

/// Expert of place `i` of this lane; those past the end are not below num_experts.
__device__ inline int expert_at(const GatingKernelParams& params, int i) {
  return i < params.run_length ? lane_idx() * params.run_length + i : params.gating.num_experts;
}

/// How many experts this lane has.
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

/// Exponentials of a row and their sum, 1 if that is zero.
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
    has_nan |= i < num_present && !(scores[i] == scores[i] && compared[i] == compared[i]);
  }
  if (__any_sync(kAllLanes, has_nan)) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      row.keys[i] = i < num_present ? numeric::selection_key(scores[i], compared[i]) : kClosedKey;
    }
    return;
  }
  // Most rows: keys without a look at NaN.
#pragma unroll
  for (int i = 0; i < kRun; ++i) row.keys[i] = i < num_present ? numeric::number_key(scores[i]) : kClosedKey;
}

template <int kRun>
__device__ void sort_keys(LaneRow<kRun>& row) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) row.sorted[i] = row.keys[i];
  sort_descending<kRun>(row.sorted);
}

/// Groups of whole lanes: closes those lanes whose group is not among the best.
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
  // Each lane of a group compares it with some of the others.
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

/// Groups of any size, through shared memory: `scratch` has a word for each expert and for each group.
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
  // The keys have been read: their place takes whether each group is among the best.
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

/// The best K, descending: lane k returns the id of the k-th, -1 if there are not so many, or if it is not below K.
template <int kRun>
__device__ int choose_best(const GatingKernelParams& params, LaneRow<kRun>& row) {
  const int num_topk = params.gating.options.num_topk;
  const unsigned own_lane = 1U << lane_idx();
  const unsigned lower_lanes = own_lane - 1;
  std::uint32_t own_key = kClosedKey;
  unsigned own_holders = 1;  ///< lanes that had this key first
  for (int k = 0; k < num_topk; ++k) {
    const std::uint32_t head = row.sorted[0];
    const std::uint32_t best = max_of_warp(head);
    if (best == kClosedKey) break;
    const unsigned holders = __ballot_sync(kAllLanes, head == best);
    if (lane_idx() == k) {
      own_key = best;
      own_holders = holders;
    }
    // The lowest lane among them has the lowest expert.
    if (head == best && (holders & lower_lanes) == 0) {
#pragma unroll
      for (int i = 0; i + 1 < kRun; ++i) row.sorted[i] = row.sorted[i + 1];
      row.sorted[kRun - 1] = kClosedKey;
    }
  }
  const int winner = __ffs(static_cast<int>(own_holders)) - 1;
  // Choices of one key from one lane follow each other: as many as come before this one, so many places of that key are
  // passed over.
  const std::uint32_t key_before = __shfl_up_sync(kAllLanes, own_key, 1);
  const int winner_before = __shfl_up_sync(kAllLanes, winner, 1);
  const bool repeats = lane_idx() > 0 && key_before == own_key && winner_before == winner;
  const unsigned first_ones = ~__ballot_sync(kAllLanes, repeats);
  int num_passed = lane_idx() - (kWarpLanes - 1 - __clz(static_cast<int>(first_ones & (lower_lanes | own_lane))));
  int place = -1;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const std::uint32_t key = __shfl_sync(kAllLanes, row.keys[i], winner);
    if (key == own_key && num_passed-- == 0) place = i;
  }
  return own_key == kClosedKey ? -1 : winner * params.run_length + place;
}

/// The weight of the expert that this lane chose, 0 for -1.
template <int kRun>
__device__ float weigh(const GatingKernelParams& params, std::int64_t token, const LaneRow<kRun>& row, int id) {
  const GatingParams& gating = params.gating;
  const GatingOptions& options = gating.options;
  const float none = numeric::float_of(0x80000000U | numeric::kFloatInfinity);
  const float logit = id >= 0 ? logit_at(gating, token, id) : none;
  float part = 0;
  if (options.score == GatingScore::kSigmoid) {
    part = numeric::sigmoid(logit);
  } else if (numeric::sum_of_row_cancels(options)) {
    part = numeric::relative_exponential(logit, largest_of_warp(logit));
  } else {
    const float largest = largest_logit<kRun>(row.logits);
    float exponentials[kRun];
    const float sum = exponentials_of_row<kRun>(row.logits, largest, exponentials);
    part = numeric::relative_exponential(logit, largest) / sum;
  }
  if (id < 0) part = 0;
  return numeric::final_weight(part, sum_of_warp(part), options);
}

template <int kRun>
__device__ void load_bias(const GatingKernelParams& params, float (&bias)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int expert = expert_at(params, i);
    bias[i] = params.gating.bias != nullptr && expert < params.gating.num_experts ? params.gating.bias[expert] : 0.0F;
  }
}

/// Lane k returns the id of the k-th expert, -1 for none. `is_full(expert)`: it may not be chosen.
template <int kRun, typename IsFull>
__device__ int choose(const GatingKernelParams& params, std::int64_t token, const float (&bias)[kRun],
                      LaneRow<kRun>& row, std::uint32_t* scratch, IsFull is_full) {
  load_logits<kRun>(params, token, row.logits);
  make_keys<kRun>(params, token, bias, row);
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int expert = expert_at(params, i);
    if (expert < params.gating.num_experts && is_full(expert)) row.keys[i] = kClosedKey;
  }
  const bool limited = numeric::is_group_limited(params.gating.options);
  if (limited && params.group_lanes == 0) close_experts<kRun>(params, row, scratch);
  sort_keys<kRun>(row);
  if (limited && params.group_lanes > 0) close_lanes<kRun>(params, row);
  return choose_best<kRun>(params, row);
}

struct Entry {
  std::int64_t token = 0;
  int k = 0;
};

/// The entry 32 further on.
__device__ inline Entry entry_after_warp(const Entry& entry, int num_topk) {
  Entry next{entry.token + kWarpLanes / num_topk, entry.k + kWarpLanes % num_topk};
  if (next.k >= num_topk) {
    next.k -= num_topk;
    ++next.token;
  }
  return next;
}

__device__ inline void store_entry(const GatingParams& params, const Entry& entry, int id, float weight) {
  const std::int64_t at = entry.token * params.ids_row_stride + entry.k * params.ids_column_stride;
  if (params.wide_ids) {
    static_cast<std::int64_t*>(params.ids)[at] = id;
  } else {
    static_cast<std::int32_t*>(params.ids)[at] = id;
  }
  params.weights[entry.token * params.weights_row_stride + entry.k * params.weights_column_stride] = weight;
}

__device__ inline int load_id(const GatingParams& params, const Entry& entry) {
  const std::int64_t at = entry.token * params.ids_row_stride + entry.k * params.ids_column_stride;
  return params.wide_ids ? static_cast<int>(static_cast<const std::int64_t*>(params.ids)[at])
                         : static_cast<const std::int32_t*>(params.ids)[at];
}

/// Each lane below K has one.
__device__ inline void store_choice(const GatingParams& params, std::int64_t token, int id, float weight) {
  if (lane_idx() < params.options.num_topk) store_entry(params, {token, lane_idx()}, id, weight);
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_NUMERIC_GATING_CUH
