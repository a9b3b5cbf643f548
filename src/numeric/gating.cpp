#include "ferry/gating.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "numeric/strided.hpp"

namespace ferry {
namespace {

using numeric::bad_argument;
using numeric::check_matrix;
using numeric::check_output_matrix;
using numeric::MatrixRule;

constexpr std::string_view kCall = "select_experts";
/// The score of a group of experts is the sum of this many best ones. (DeepSeek-V3 technical report, section 2.1.2.)
constexpr std::ptrdiff_t kNumBestInGroup = 2;

Status bad_option(std::string_view name, const std::string& observed, const std::string& expected,
                  std::string_view hint) {
  return bad_argument({kCall, name}, observed, expected, hint);
}

Status validate_options(const GatingOptions& options, std::int64_t num_experts) {
  if (options.score != GatingScore::kSoftmax && options.score != GatingScore::kSigmoid)
    return bad_option("options.score", std::to_string(static_cast<int>(options.score)), "kSoftmax or kSigmoid",
                      "pass an enumerator");
  if (options.num_groups < 1 || num_experts % options.num_groups != 0)
    return bad_option("options.num_groups", std::to_string(options.num_groups),
                      fmt::format("a divisor of the {} experts", num_experts), "1 means no groups");
  if (options.num_selected_groups < 1 || options.num_selected_groups > options.num_groups)
    return bad_option("options.num_selected_groups", std::to_string(options.num_selected_groups),
                      fmt::format("1 to num_groups = {}", options.num_groups), "select at most all groups");
  const std::int64_t num_candidates = num_experts / options.num_groups * options.num_selected_groups;
  if (options.num_topk < 1 || options.num_topk > num_candidates)
    return bad_option("options.num_topk", std::to_string(options.num_topk),
                      fmt::format("1 to {}, the experts of the selected groups", num_candidates),
                      "lower num_topk or select more groups");
  return {};
}

Status check_dtype(const ConstTensorView& view, const MatrixRule& rule, DType dtype) {
  if (view.dtype == dtype) return {};
  return bad_argument(rule, std::string(to_string(view.dtype)), std::string(to_string(dtype)), "convert it first");
}

Status validate_bias(const ConstTensorView& bias, std::int64_t num_experts) {
  if (!bias.present()) return {};
  const MatrixRule rule{kCall, "bias"};
  if (bias.num_dims != 1 || bias.extent(0) != num_experts)
    return bad_argument(rule, numeric::shape_text(bias), fmt::format("[{}]", num_experts), "one bias per expert");
  if (Status status = check_dtype(bias, rule, DType::kFloat32); !status.ok()) return status;
  if (bias.stride(0) != 1 && num_experts > 1)
    return bad_argument(rule, fmt::format("of stride {}", bias.stride(0)), "contiguous", "make it contiguous");
  // Check the pointer as for a matrix of one row.
  return check_matrix(ConstTensorView(bias.data, bias.dtype, {1, num_experts}), {kCall, "bias", 1, num_experts});
}

Status validate(const ConstTensorView& logits, const ConstTensorView& bias, const GatingOptions& options,
                const TensorView& topk_idx, const TensorView& topk_weights) {
  if (logits.num_dims != 2 || logits.extent(0) < 0 || logits.extent(1) < 1 ||
      logits.extent(1) > std::numeric_limits<std::int32_t>::max())
    return bad_argument({kCall, "logits"}, logits.present() ? numeric::shape_text(logits) : "absent", "[T, E], E >= 1",
                        "give one row of router logits per token");
  const std::int64_t num_tokens = logits.extent(0);
  const std::int64_t num_experts = logits.extent(1);
  if (Status status = validate_options(options, num_experts); !status.ok()) return status;

  const MatrixRule logits_rule{kCall, "logits", num_tokens, num_experts};
  const MatrixRule idx_rule{kCall, "topk_idx", num_tokens, options.num_topk};
  const MatrixRule weights_rule{kCall, "topk_weights", num_tokens, options.num_topk};
  if (Status status = check_matrix(logits, logits_rule); !status.ok()) return status;
  if (Status status = check_dtype(logits, logits_rule, DType::kFloat32); !status.ok()) return status;
  if ((num_experts > 1 && logits.stride(1) != 1) || (num_tokens > 1 && logits.stride(0) != num_experts))
    return bad_argument(logits_rule, fmt::format("of strides [{}, {}]", logits.stride(0), logits.stride(1)),
                        fmt::format("contiguous, [{}, 1]", num_experts), "make it contiguous");
  if (Status status = validate_bias(bias, num_experts); !status.ok()) return status;
  if (Status status = check_output_matrix(topk_idx, idx_rule); !status.ok()) return status;
  if (topk_idx.dtype != DType::kInt32 && topk_idx.dtype != DType::kInt64)
    return bad_argument(idx_rule, std::string(to_string(topk_idx.dtype)), "i32 or i64", "give a view of that dtype");
  if (Status status = check_output_matrix(topk_weights, weights_rule); !status.ok()) return status;
  return check_dtype(topk_weights, weights_rule, DType::kFloat32);
}

/// Subtracts the largest logit first so that nothing overflows. Logits of +infinity share all of the weight equally; a
/// NaN makes the whole row NaN.
void softmax(std::span<const float> logits, std::span<float> scores) {
  float largest = -std::numeric_limits<float>::infinity();
  for (float logit : logits) largest = logit > largest ? logit : largest;
  float sum = 0;
  for (std::size_t expert = 0; expert < logits.size(); ++expert) {
    scores[expert] = logits[expert] == largest ? 1.0F : std::exp(logits[expert] - largest);
    sum += scores[expert];
  }
  for (float& score : scores) score /= sum;
}

/// Both forms keep the exponential at or below 1.
float sigmoid(float logit) {
  if (logit >= 0) return 1.0F / (1.0F + std::exp(-logit));
  const float exponential = std::exp(logit);
  return exponential / (1.0F + exponential);
}

/// Orders the `count` best indices to the front: by descending score, ties by ascending index.
void best_first(std::span<const float> scores, std::vector<std::int32_t>& indices, std::ptrdiff_t count) {
  const auto better = [scores](std::int32_t a, std::int32_t b) {
    const float score_a = scores[static_cast<std::size_t>(a)];
    const float score_b = scores[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  };
  std::partial_sort(indices.begin(), indices.begin() + count, indices.end(), better);
}

/// Chooses the experts of one token after another; reuses its scratch memory.
class Selector {
 public:
  Selector(const GatingOptions& options, std::size_t num_experts)
      : options_(options),
        group_size_(num_experts / static_cast<std::size_t>(options.num_groups)),
        scores_(num_experts),
        selection_(num_experts),
        group_scores_(static_cast<std::size_t>(options.num_groups)) {}

  /// Afterwards `chosen()` are the ids and `weights()` their weights.
  void select(std::span<const float> logits, const float* bias) {
    if (options_.score == GatingScore::kSoftmax) {
      softmax(logits, scores_);
    } else {
      std::transform(logits.begin(), logits.end(), scores_.begin(), sigmoid);
    }
    for (std::size_t expert = 0; expert < scores_.size(); ++expert) {
      const float score = bias != nullptr ? scores_[expert] + bias[expert] : scores_[expert];
      // NaN does not compare: it is chosen last.
      selection_[expert] = std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
    }
    list_candidates();
    best_first(selection_, candidates_, options_.num_topk);
    candidates_.resize(static_cast<std::size_t>(options_.num_topk));
    weigh();
  }

  std::span<const std::int32_t> chosen() const { return candidates_; }
  std::span<const float> weights() const { return weights_; }

 private:
  void list_candidates() {
    candidates_.clear();
    if (options_.num_selected_groups == options_.num_groups) {
      candidates_.resize(scores_.size());
      std::iota(candidates_.begin(), candidates_.end(), 0);
      return;
    }
    for (std::size_t group = 0; group < group_scores_.size(); ++group) group_scores_[group] = group_score(group);
    groups_.resize(group_scores_.size());
    std::iota(groups_.begin(), groups_.end(), 0);
    best_first(group_scores_, groups_, options_.num_selected_groups);
    for (std::size_t i = 0; i < static_cast<std::size_t>(options_.num_selected_groups); ++i) {
      const std::size_t first = static_cast<std::size_t>(groups_[i]) * group_size_;
      for (std::size_t expert = first; expert < first + group_size_; ++expert)
        candidates_.push_back(static_cast<std::int32_t>(expert));
    }
  }

  float group_score(std::size_t group) {
    const auto first = selection_.begin() + static_cast<std::ptrdiff_t>(group * group_size_);
    best_.assign(first, first + static_cast<std::ptrdiff_t>(group_size_));
    const std::ptrdiff_t count = std::min(kNumBestInGroup, static_cast<std::ptrdiff_t>(group_size_));
    std::partial_sort(best_.begin(), best_.begin() + count, best_.end(), std::greater<>());
    const float sum = std::accumulate(best_.begin(), best_.begin() + count, 0.0F);
    return std::isnan(sum) ? -std::numeric_limits<float>::infinity() : sum;
  }

  void weigh() {
    weights_.clear();
    for (std::int32_t expert : candidates_) weights_.push_back(scores_[static_cast<std::size_t>(expert)]);
    const float sum = std::accumulate(weights_.begin(), weights_.end(), 0.0F);
    // Scores that all underflowed to zero stay zero instead of becoming NaN.
    const float divisor = options_.normalize && sum != 0 ? sum : 1.0F;
    for (float& weight : weights_) weight = weight / divisor * options_.scale;
  }

  const GatingOptions options_;
  std::size_t group_size_;
  std::vector<float> scores_;
  std::vector<float> selection_;
  std::vector<float> group_scores_;
  std::vector<float> best_;
  std::vector<float> weights_;
  std::vector<std::int32_t> groups_;
  std::vector<std::int32_t> candidates_;
};

void store_id(const TensorView& topk_idx, std::int64_t offset, std::int32_t id) {
  if (topk_idx.dtype == DType::kInt32) {
    static_cast<std::int32_t*>(topk_idx.data)[offset] = id;
  } else {
    static_cast<std::int64_t*>(topk_idx.data)[offset] = id;
  }
}

}  // namespace

Status select_experts(const ConstTensorView& logits, const ConstTensorView& bias, const GatingOptions& options,
                      const TensorView& topk_idx, const TensorView& topk_weights) {
  if (Status status = validate(logits, bias, options, topk_idx, topk_weights); !status.ok()) return status;
  const auto num_experts = static_cast<std::size_t>(logits.extent(1));
  const auto* bias_data = bias.present() ? static_cast<const float*>(bias.data) : nullptr;
  Selector selector(options, num_experts);
  for (std::int64_t token = 0; token < logits.extent(0); ++token) {
    const float* row = static_cast<const float*>(logits.data) + token * logits.extent(1);
    selector.select({row, num_experts}, bias_data);
    for (std::int64_t k = 0; k < options.num_topk; ++k) {
      const auto at = static_cast<std::size_t>(k);
      store_id(topk_idx, token * topk_idx.stride(0) + k * topk_idx.stride(1), selector.chosen()[at]);
      const std::int64_t offset = token * topk_weights.stride(0) + k * topk_weights.stride(1);
      static_cast<float*>(topk_weights.data)[offset] = selector.weights()[at];
    }
  }
  return {};
}

}  // namespace ferry
