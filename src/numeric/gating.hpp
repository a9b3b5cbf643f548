#ifndef FERRY_NUMERIC_GATING_HPP
#define FERRY_NUMERIC_GATING_HPP

/// Choice of experts with checked arguments: parameters for host and kernels, the rules that both share, and the loops
/// on the host.

#include <cstdint>
#include <span>

#include "ferry/gating.hpp"
#include "numeric/exponential.hpp"
#include "plan/host_device.hpp"

namespace ferry::numeric {

/// Strides in elements.
struct GatingParams {
  GatingOptions options;
  std::int64_t num_tokens = 0;
  int num_experts = 0;
  const void* logits = nullptr;  ///< contiguous
  bool is_bfloat16 = false;
  const float* bias = nullptr;  ///< null: none
  void* ids = nullptr;
  bool wide_ids = true;  ///< i64
  std::int64_t ids_row_stride = 0;
  std::int64_t ids_column_stride = 1;
  float* weights = nullptr;
  std::int64_t weights_row_stride = 0;
  std::int64_t weights_column_stride = 1;
};

/// Number of partial sums of a row, and of places in a sum over the chosen experts: the lanes of a warp.
inline constexpr int kGatingRuns = 32;

FERRY_HOST_DEVICE constexpr int gating_run_length(int num_experts) {
  return (num_experts + kGatingRuns - 1) / kGatingRuns;
}

FERRY_HOST_DEVICE constexpr bool is_group_limited(const GatingOptions& options) {
  return options.num_selected_groups < options.num_groups;
}

/// Whether experts are compared by logit, plus bias for kSoftmaxOfChosen, so that choosing needs no score.
FERRY_HOST_DEVICE constexpr bool selects_by_logit(const GatingOptions& options, bool has_bias) {
  if (options.score == GatingScore::kSoftmaxOfChosen) return true;
  return !has_bias && !(is_group_limited(options) && options.group_score == GatingGroupScore::kBestTwo);
}

/// Whether weights are exponentials relative to the row's largest logit, divided by the sum of the chosen ones.
FERRY_HOST_DEVICE constexpr bool sum_of_row_cancels(const GatingOptions& options) {
  return options.score == GatingScore::kSoftmaxOfChosen ||
         (options.score == GatingScore::kSoftmax && options.normalize && options.epsilon == 0);
}

/// Keys order selection scores, the larger the better: NaN lowest, zeros of both signs alike. kClosedKey marks experts
/// that may not be chosen.
inline constexpr std::uint32_t kClosedKey = 0;
inline constexpr std::uint32_t kNanKey = 1;

FERRY_HOST_DEVICE inline bool is_nan(float value) { return (bits_of(value) & kFloatMagnitude) > kFloatInfinity; }

/// Key of a score, given as its bits, that is neither NaN nor a negative zero.
FERRY_HOST_DEVICE inline std::uint32_t key_of_bits(std::uint32_t bits) {
  return bits ^ ((0U - (bits >> 31)) | 0x80000000U);
}

/// Key of a score that is not NaN.
FERRY_HOST_DEVICE inline std::uint32_t number_key(float score) {
  return key_of_bits(bits_of(score + 0.0F));  // -0 becomes +0
}

FERRY_HOST_DEVICE inline std::uint32_t selection_key(float score) {
  const std::uint32_t nan = mask_of(is_nan(score));
  return (kNanKey & nan) | (number_key(score) & ~nan);
}

/// Key of an expert whose own logit may be NaN, in which case the bias has no effect.
FERRY_HOST_DEVICE inline std::uint32_t selection_key(float score, float logit) {
  const std::uint32_t nan = mask_of(is_nan(logit));
  return (kNanKey & nan) | (selection_key(score) & ~nan);
}

/// Score of a key; -infinity for keys of no number.
FERRY_HOST_DEVICE inline float score_of_key(std::uint32_t key) {
  const std::uint32_t bits = (key >> 31) != 0 ? key ^ 0x80000000U : ~key;
  return key <= kNanKey ? float_of(0x80000000U | kFloatInfinity) : float_of(bits);
}

/// Key of a group from the keys of its best two experts; `second` is kClosedKey in a group of one.
FERRY_HOST_DEVICE inline std::uint32_t group_key(std::uint32_t best, std::uint32_t second, bool sums, bool has_second) {
  if (!sums || !has_second) return best;
  return selection_key(score_of_key(best) + score_of_key(second));
}

/// Exponential of a logit in a softmax; 1 for the largest logit, even if that is infinite.
FERRY_HOST_DEVICE inline float relative_exponential(float logit, float largest) {
  const std::uint32_t equal = mask_of(logit == largest);
  return float_of((bits_of(1.0F) & equal) | (bits_of(exponential(logit - largest)) & ~equal));
}

// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3.
inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53U;
inline constexpr std::uint32_t kPhiloxMultiplier1 = 0xCD9E8D57U;
inline constexpr std::uint32_t kPhiloxWeyl0 = 0x9E3779B9U;
inline constexpr std::uint32_t kPhiloxWeyl1 = 0xBB67AE85U;
inline constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  std::uint32_t words[4];
};

FERRY_HOST_DEVICE inline PhiloxWords philox(PhiloxWords counter, std::uint64_t key) {
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  PhiloxWords c = counter;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t product0 = static_cast<std::uint64_t>(kPhiloxMultiplier0) * c.words[0];
    const std::uint64_t product1 = static_cast<std::uint64_t>(kPhiloxMultiplier1) * c.words[2];
    c = {{static_cast<std::uint32_t>(product1 >> 32) ^ c.words[1] ^ key0, static_cast<std::uint32_t>(product1),
          static_cast<std::uint32_t>(product0 >> 32) ^ c.words[3] ^ key1, static_cast<std::uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return c;
}

/// Noise of mean 0 and variance 1: the sum of four uniform numbers of 16 bits. Their mean is 65535 / 2 and the variance
/// of each is (2^32 - 1) / 12, so that of all four is (2^32 - 1) / 3.
FERRY_HOST_DEVICE inline float unit_noise(std::uint64_t seed, std::int64_t token, int expert) {
  const auto at = static_cast<std::uint64_t>(token);
  const PhiloxWords drawn = philox(
      {{static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at >> 32), static_cast<std::uint32_t>(expert), 0}},
      seed);
  constexpr std::uint32_t kLow = 0xFFFFU;
  const std::uint32_t sum =
      (drawn.words[0] & kLow) + (drawn.words[0] >> 16) + (drawn.words[1] & kLow) + (drawn.words[1] >> 16);
  constexpr std::int32_t kMean = 2 * 65535;
  constexpr float kPerDeviation = 0x1.bb67aep-16F;  // sqrt(3 / (2^32 - 1))
  return static_cast<float>(static_cast<std::int32_t>(sum) - kMean) * kPerDeviation;
}

/// Logit with noise, as compared in the choice, before a score is computed.
FERRY_HOST_DEVICE inline float noisy(float logit, const GatingOptions& options, std::int64_t token, int expert) {
  const float drawn = unit_noise(options.noise_seed, options.first_token + token, expert);
  return fused_multiply_add(options.noise, drawn, logit);
}

/// Weight of a chosen expert from its part of `sum`, the sum over all chosen experts.
FERRY_HOST_DEVICE inline float final_weight(float part, float sum, const GatingOptions& options) {
  const bool divides = options.normalize || options.score == GatingScore::kSoftmaxOfChosen;
  const float divisor = divides ? sum + options.epsilon : 1.0F;
  // Scores that all underflowed to zero stay zero instead of becoming NaN.
  return part / (divisor == 0 ? 1.0F : divisor) * options.scale;
}

/// choose_experts for one instruction set.
struct GatingVariant {
  const char* name = "";
  bool available = false;  ///< on this processor
  void (*choose)(const GatingParams&) = nullptr;
};

/// All variants, best first; the last is always available. They give the same bits.
std::span<const GatingVariant> gating_variants();

void choose_experts(const GatingParams& params);

}  // namespace ferry::numeric

#endif  // FERRY_NUMERIC_GATING_HPP
