#ifndef FERRY_GATING_HPP
#define FERRY_GATING_HPP

/// Router scores to top-k experts: plain, or limited to the best groups of experts (node-limited routing). Host memory.

#include <cstdint>

#include "ferry/export.hpp"
#include "ferry/status.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// How logits become scores.
enum class GatingScore : std::int32_t {
  kSoftmax = 0,  ///< over all E experts (Mixtral, Qwen, gpt-oss families)
  kSigmoid = 1,  ///< each on its own (DeepSeek-V3, Kimi-K2)
};

struct GatingOptions {
  GatingScore score = GatingScore::kSoftmax;
  int num_topk = 1;
  /// Group-limited selection (DeepSeek-V3 technical report, section 2.1.2): experts form `num_groups` equal contiguous
  /// groups; only the `num_selected_groups` groups with the largest sum of their two best scores (best one, if a group
  /// has one expert) may be chosen from. 1 and 1: no limit.
  int num_groups = 1;
  int num_selected_groups = 1;
  bool normalize = true;  ///< divide the chosen weights by their sum
  float scale = 1.0F;     ///< then multiply by this
};

/// Choose experts for each token. Selection uses score + bias, weights use the score alone. Ties go to the lower expert
/// id; a row's ids are in descending order of selection score.
/// NaN scores are chosen last. Logits of +infinity share a softmax's weight equally. A zero sum stays zero when
/// normalised.
/// @shape  logits [T, E] f32 contiguous; bias [E] f32 or absent; topk_idx [T, K] i32|i64; topk_weights [T, K] f32
/// @errors kInvalidArgument: shapes, dtypes, K > E or > experts in the selected groups, E not divisible by num_groups
FERRY_API Status select_experts(const ConstTensorView& logits, const ConstTensorView& bias,
                                const GatingOptions& options, const TensorView& topk_idx,
                                const TensorView& topk_weights);

}  // namespace ferry

#endif  // FERRY_GATING_HPP
