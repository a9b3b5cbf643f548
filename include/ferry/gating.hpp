#ifndef FERRY_GATING_HPP
#define FERRY_GATING_HPP

/// Gate of a Mixture-of-Experts layer: router logits to top-k experts and their weights, with the same bits on CPUs and
/// GPUs.

#include <cstdint>
#include <span>
#include <string_view>

#include "ferry/export.hpp"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// Function from logits to scores.
enum class GatingScore : std::int32_t {
  kSoftmax = 0,          ///< over all E experts (Qwen family)
  kSigmoid = 1,          ///< of each logit alone (DeepSeek-V3, Kimi-K2)
  kSoftmaxOfChosen = 2,  ///< logits choose, and the weights are the softmax of the chosen logits (gpt-oss, Mixtral)
};

/// Score of a group of experts.
enum class GatingGroupScore : std::int32_t {
  kBestTwo = 0,  ///< the sum of its two best scores (DeepSeek-V3 technical report, section 2.1.2)
  kBest = 1,     ///< its best score (DeepSeek-V2)
};

/// Treatment of a token that chose a full expert.
enum class GatingOverflow : std::int32_t {
  kDrop = 0,      ///< the token loses that entry: id -1 and weight 0; the other weights stay
  kRechoose = 1,  ///< all its experts are chosen again, among those not full; id -1 and weight 0 if too few are left
};

/// Largest number of experts that select_experts supports on GPUs.
inline constexpr std::int64_t kMaxGatingExpertsOnGpu = 512;

struct GatingOptions {
  GatingScore score = GatingScore::kSoftmax;
  int num_topk = 1;  ///< K, at most kMaxTopk = 32
  /// Group-limited selection (DeepSeek-V3 technical report, section 2.1.2): experts form `num_groups` equal contiguous
  /// groups; only the `num_selected_groups` groups with the best `group_score` may be chosen from. 1 and 1: no limit.
  int num_groups = 1;
  int num_selected_groups = 1;
  bool normalize = true;  ///< divide the chosen weights by their sum; kSoftmaxOfChosen always does
  float scale = 1.0F;     ///< factor of the weights, applied afterwards
  GatingGroupScore group_score = GatingGroupScore::kBestTwo;
  float epsilon = 0.0F;  ///< added to the sum that `normalize` divides by; 0 or more
  /// Tokens that each expert takes in this call; 0: any number. Tokens are served in ascending order, a token's experts
  /// from its best to its last. On GPUs a single block does the work of kRechoose.
  std::int64_t capacity = 0;
  GatingOverflow overflow = GatingOverflow::kDrop;
  /// Exploration: standard deviation of the noise added to each logit for choosing, not for weighing; 0: none. The
  /// noise is a sum of four uniform numbers, so at most 2 * sqrt(3) deviations, from Philox4x32-10 (Salmon et al., SC
  /// 2011) at counter (token, expert): the same for the same seed, token and expert on any backend.
  float noise = 0.0F;
  std::uint64_t noise_seed = 0;
  std::int64_t first_token = 0;  ///< number of the first row for the noise; choose it so that ranks and steps differ
};

/// Choose experts for each token. Selection uses score + bias, weights use the score alone. Ties go to the lower expert
/// id; a row's ids are in descending order of selection score.
/// Without a bias, and unless groups are scored by sums, logits are compared in place of their scores: the same order,
/// without ties caused by rounding. kSoftmaxOfChosen selects by logit + bias.
/// NaN (a logit, or score + bias) is the lowest: chosen only if nothing else is left; a NaN logit has score 0. Logits
/// of +infinity share a softmax's weight equally. A zero sum stays zero when normalised.
/// Results have the same bits on every backend. The exponential is Ferry's own (within 1.01 ulp; 0 below -87). A sum
/// over a row is a sum of 32 partial sums, each of ceil(E/32) consecutive experts in ascending order; a sum over the
/// chosen experts is a sum of 32 places. The 32 values are reduced by adding each to the value 16 places before it,
/// then 8, 4, 2 and 1. `normalize` of a softmax without epsilon divides exponentials by the sum of the chosen ones,
/// because the row's sum cancels.
/// @shape  logits [T, E] f32 | bf16 contiguous; bias [E] f32 or absent; topk_idx [T, K] i32 | i64; topk_weights [T, K]
///         f32, both of any strides without overlap
/// @sync   as ExecutionOptions::backend says (with a capacity two kernels)
/// @errors kInvalidArgument: shapes, dtypes, K > 32 or > E or > experts in the selected groups, E not divisible by
///         num_groups, options out of range, memory that the backend cannot use; kUnsupported: E > 512 on a GPU, no
///         such backend in this build. Nothing is written in either case. kCuda: a launch failed
FERRY_API Status select_experts(const ConstTensorView& logits, const ConstTensorView& bias,
                                const GatingOptions& options, const TensorView& topk_idx,
                                const TensorView& topk_weights, const ExecutionOptions& execution = {},
                                Stream stream = {});

/// Balancing without an auxiliary loss (DeepSeek-V3 technical report, section 2.1.2; Wang et al., arXiv 2408.15664):
/// each expert's bias falls by `rate` where its load is above the mean load, rises by `rate` where it is below, and
/// stays where it is equal. The comparison is exact, in integers: load * E with the sum of all loads. Host memory.
/// @shape  bias [E] f32, load [E] i32 | i64, both contiguous
/// @errors kInvalidArgument: shapes, dtypes, a load below 0 or a sum of loads of 2^53 or more, a rate that is not
///         finite or below 0. Nothing is written
FERRY_API Status update_gating_bias(const TensorView& bias, const ConstTensorView& load, float rate);

/// Gating of a published model.
struct GatingPreset {
  std::string_view name;  ///< "deepseek-v3"
  std::int64_t num_experts = 0;
  bool has_bias = false;  ///< the model includes a selection bias for each expert
  GatingOptions options;
  std::string_view source;  ///< publication that defines it
};

/// deepseek-v3, kimi-k2, qwen3-235b, gpt-oss-120b, mixtral-8x7b.
FERRY_API std::span<const GatingPreset> gating_presets();

/// Preset of exactly this name; null if there is none.
FERRY_API const GatingPreset* find_gating_preset(std::string_view name);

}  // namespace ferry

#endif  // FERRY_GATING_HPP
