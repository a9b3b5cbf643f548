#ifndef FERRY_CUDA_LOCAL_GATING_THREAD_CUH
#define FERRY_CUDA_LOCAL_GATING_THREAD_CUH

/// A thread chooses the experts of a token when there are few experts: a warp would leave most of its lanes idle. The
/// rules, and the bits of the results, are those of numeric/gating.hpp; a run of experts there is a single expert here.

#include <cstddef>
#include <cstdint>

#include "cuda/local/gating_entry.cuh"

namespace ferry::cuda::device {

inline constexpr int kThreadExperts = 8;  ///< most experts

using ThreadRow = float[kThreadExperts];

/// Sum by a tree, in the order of a sum over 32 places of which the rest are zeros.
__device__ inline float sum_of_tree(ThreadRow& values) {
#pragma unroll
  for (int distance = kThreadExperts / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) values[i] += values[i + distance];
  }
  return values[0];
}

/// Largest value; -infinity if all are NaN.
__device__ inline float largest_of_thread(const ThreadRow& values) {
  float largest = numeric::float_of(0x80000000U | numeric::kFloatInfinity);
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

/// Exponentials of a row, and their sum, or 1 if the sum is zero.
__device__ inline float exponentials_of_thread(const ThreadRow& logits, float largest, ThreadRow& exponentials) {
  ThreadRow places;
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) {
    exponentials[i] = numeric::relative_exponential(logits[i], largest);
    places[i] = exponentials[i];
  }
  const float sum = sum_of_tree(places);
  return sum == 0 ? 1.0F : sum;
}

/// Loads a row of logits, with NaN for places without an expert.
__device__ inline void load_row(const GatingKernelParams& params, std::int64_t token, ThreadRow& logits) {
  const GatingParams& gating = params.gating;
  if (params.whole_rows) {
    const auto* const from =
        reinterpret_cast<const float4*>(static_cast<const float*>(gating.logits) + token * kThreadExperts);
    const float4 low = from[0];
    const float4 high = from[1];
    const ThreadRow loaded = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kThreadExperts; ++i) logits[i] = loaded[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) {
    logits[i] = i < gating.num_experts ? logit_at(gating, token, i) : numeric::float_of(numeric::kFloatNan);
  }
}

__device__ inline void make_thread_keys(const GatingParams& gating, std::int64_t token, const ThreadRow& logits,
                                        std::uint32_t (&keys)[kThreadExperts]) {
  const GatingOptions& options = gating.options;
  const bool has_bias = gating.bias != nullptr;
  ThreadRow compared;
  ThreadRow scores;
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) compared[i] = logits[i];
  if (options.noise > 0) {
#pragma unroll
    for (int i = 0; i < kThreadExperts; ++i) compared[i] = numeric::noisy(logits[i], options, token, i);
  }
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) scores[i] = compared[i];
  if (!numeric::selects_by_logit(options, has_bias)) {
    if (options.score == GatingScore::kSigmoid) {
#pragma unroll
      for (int i = 0; i < kThreadExperts; ++i) scores[i] = numeric::sigmoid(compared[i]);
    } else {
      const float sum = exponentials_of_thread(compared, largest_of_thread(compared), scores);
#pragma unroll
      for (int i = 0; i < kThreadExperts; ++i) scores[i] = scores[i] / sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kThreadExperts; ++i) {
    keys[i] = kClosedKey;
    if (i < gating.num_experts) {
      if (has_bias) scores[i] += gating.bias[i];
      keys[i] = numeric::selection_key(scores[i], compared[i]);
    }
  }
}

/// Chooses, weighs and stores the experts of a token, without limiting groups.
__device__ inline void gate_in_thread(const GatingKernelParams& params, std::int64_t token) {
  const GatingParams& gating = params.gating;
  const GatingOptions& options = gating.options;
  ThreadRow logits;
  load_row(params, token, logits);
  std::uint32_t keys[kThreadExperts];
  make_thread_keys(gating, token, logits, keys);
  const float none = numeric::float_of(0x80000000U | numeric::kFloatInfinity);
  int ids[kThreadExperts];
  ThreadRow parts;  // holds the chosen experts' logits first
#pragma unroll
  for (int k = 0; k < kThreadExperts; ++k) {
    ids[k] = -1;
    parts[k] = none;
    if (k < options.num_topk) {
      std::uint32_t best = kClosedKey;
#pragma unroll
      for (int i = 0; i < kThreadExperts; ++i) best = max(best, keys[i]);
        // The lowest expert wins among equal keys.
#pragma unroll
      for (int i = 0; i < kThreadExperts; ++i) {
        const bool wins = best != kClosedKey && ids[k] < 0 && keys[i] == best;
        ids[k] = wins ? i : ids[k];
        parts[k] = wins ? logits[i] : parts[k];
        keys[i] = wins ? kClosedKey : keys[i];
      }
    }
  }
  if (options.score == GatingScore::kSigmoid) {
#pragma unroll
    for (int k = 0; k < kThreadExperts; ++k) parts[k] = numeric::sigmoid(parts[k]);
  } else {
    const bool cancels = numeric::sum_of_row_cancels(options);
    const float largest = largest_of_thread(cancels ? parts : logits);
    ThreadRow exponentials;
    const float sum = cancels ? 1.0F : exponentials_of_thread(logits, largest, exponentials);
#pragma unroll
    for (int k = 0; k < kThreadExperts; ++k) {
      if (k < options.num_topk) parts[k] = numeric::relative_exponential(parts[k], largest) / sum;
    }
  }
  ThreadRow places;
#pragma unroll
  for (int k = 0; k < kThreadExperts; ++k) {
    if (ids[k] < 0) parts[k] = 0;
    places[k] = parts[k];
  }
  const float sum = sum_of_tree(places);
#pragma unroll
  for (int k = 0; k < kThreadExperts; ++k) {
    if (k < options.num_topk) store_entry(gating, {token, k}, ids[k], numeric::final_weight(parts[k], sum, options));
  }
}

}  // namespace ferry::cuda::device

#endif  // FERRY_CUDA_LOCAL_GATING_THREAD_CUH
