#ifndef FERRY_GATING_HPP
#define FERRY_GATING_HPP

/// The gate of a Mixture-of-Experts layer: router logits to top-k experts and their weights, on CPUs and GPUs with the
/// same bits.

#include <cstdint>
#include <span>
#include <string_view>

#include "ferry/export.hpp"
#include "ferry/quantization.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// How logits become scores.
enum class GatingScore : std::int32_t {
  kSoftmax = 0,          ///< over all E experts (Qwen family)
  kSigmoid = 1,          ///< each on its own (DeepSeek-V3, Kimi-K2)
  kSoftmaxOfChosen = 2,  ///< logits choose, and the weights are the softmax of the chosen ones (gpt-oss, Mixtral)
};

/// What a group of experts is judged by.
enum class GatingGroupScore : std::int32_t {
  kBestTwo = 0,  ///< the sum of its two best scores (DeepSeek-V3 technical report, section 2.1.2)
  kBest = 1,     ///< its best score (DeepSeek-V2)
};

/// What becomes of a token that chose an expert which is full.
enum class GatingOverflow : std::int32_t {
  kDrop = 0,      ///< it loses that entry: id -1 and weight 0; the other weights stay
  kRechoose = 1,  ///< it chooses all its experts again, from those that are not full; id -1 and weight 0 if too few are
};

/// Experts that select_experts takes on GPUs.
inline constexpr std::int64_t kMaxGatingExpertsOnGpu = 512;

struct GatingOptions {
  GatingScore score = GatingScore::kSoftmax;
  int num_topk = 1;  ///< K, at most kMaxTopk = 32
  /// Group-limited selection (DeepSeek-V3 technical report, section 2.1.2): experts form `num_groups` equal contiguous
  /// groups; only the `num_selected_groups` groups with the best `group_score` may be chosen from. 1 and 1: no limit.
  int num_groups = 1;
  int num_selected_groups = 1;
  bool normalize = true;  ///< divide the chosen weights by their sum; kSoftmaxOfChosen always does
  float scale = 1.0F;     ///< then multiply by this
  GatingGroupScore group_score = GatingGroupScore::kBestTwo;
  float epsilon = 0.0F;  ///< added to the sum that `normalize` divides by; 0 or more
  /// Tokens that each expert takes in this call, 0: any number. Tokens come in ascending order, a token's experts from
  /// its best to its last. On GPUs kRechoose is the work of one block.
  std::int64_t capacity = 0;
  GatingOverflow overflow = GatingOverflow::kDrop;
  /// Exploration: the standard deviation of what is added to each logit for choosing, not for weighing; 0: none. A sum
  /// of four uniform numbers, so at most 2 * sqrt(3) deviations, from Philox4x32-10 (Salmon et al., SC 2011) at counter
  /// (token, expert): the same noise for the same seed, token and expert on any backend.
  float noise = 0.0F;
  std::uint64_t noise_seed = 0;
  std::int64_t first_token = 0;  ///< number of the first row for the noise, so that ranks and steps draw different ones
};

/// Choose experts for each token. Selection uses score + bias, weights use the score alone. Ties go to the lower expert
/// id; a row's ids are in descending order of selection score.
/// Without a bias, and unless groups are judged by sums, logits are compared in place of their scores: the same order,
/// without the ties that rounding makes. kSoftmaxOfChosen selects by logit + bias.
/// NaN (a logit, or score + bias) is the lowest: chosen only when nothing else is left; a NaN logit has score 0. Logits
/// of +infinity share a softmax's weight equally. A zero sum stays zero when normalised.
/// Results have the same bits on every backend. The exponential is Ferry's own (within 1.01 ulp; 0 below -87). A sum
/// over a row is that of 32 runs of ceil(E/32) consecutive experts, each in ascending order, a sum over the chosen one
/// of 32 places; of 32 values each is added to the one 16 places before it, then 8, 4, 2 and 1. `normalize` of a
/// softmax without epsilon divides exponentials by the sum of the chosen ones, because the row's sum cancels.
/// @shape  logits [T, E] f32 | bf16 contiguous; bias [E] f32 or absent; topk_idx [T, K] i32 | i64; topk_weights [T, K]
///         f32, both of any strides without overlap
/// @sync   as ExecutionOptions::backend says (with a capacity two kernels)
/// @errors kInvalidArgument: shapes, dtypes, K > 32 or > E or > experts in the selected groups, E not divisible by
///         num_groups, options out of range, memory that the backend cannot use; kUnsupported: E > 512 on a GPU, no
///         such backend in this build. Nothing is written then. kCuda: a launch failed
FERRY_API Status select_experts(const ConstTensorView& logits, const ConstTensorView& bias,
                                const GatingOptions& options, const TensorView& topk_idx,
                                const TensorView& topk_weights, const ExecutionOptions& execution = {},
                                Stream stream = {});

/// Balancing without an auxiliary loss (DeepSeek-V3 technical report, section 2.1.2; Wang et al., arXiv 2408.15664):
/// each expert's bias goes down by `rate` where its load is above the mean load, up by `rate` where it is below, and
/// stays where it is equal. The comparison is of integers: load * E with the sum of all loads. Host memory.
/// @shape  bias [E] f32, load [E] i32 | i64, both contiguous
/// @errors kInvalidArgument: shapes, dtypes, a load below 0 or a sum of loads of 2^53 or more, a rate that is not
///         finite or below 0. Nothing is written then
FERRY_API Status update_gating_bias(const TensorView& bias, const ConstTensorView& load, float rate);

/// How a published model gates.
struct GatingPreset {
  std::string_view name;  ///< "deepseek-v3"
  std::int64_t num_experts = 0;
  bool has_bias = false;  ///< the model comes with a selection bias for each expert
  GatingOptions options;
  std::string_view source;  ///< where this was published
};

/// deepseek-v3, kimi-k2, qwen3-235b, gpt-oss-120b, mixtral-8x7b.
FERRY_API std::span<const GatingPreset> gating_presets();

/// By exact name; null if there is none.
FERRY_API const GatingPreset* find_gating_preset(std::string_view name);

}  // namespace ferry

#endif  // FERRY_GATING_HPP
