#include "ferry/gating.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "core/checks.hpp"
#include "ferry/routing.hpp"
#include "local/local_ops.hpp"
#include "numeric/strided.hpp"

namespace ferry {
namespace {

using numeric::bad_argument;
using numeric::check_matrix;
using numeric::check_output_matrix;
using numeric::MatrixRule;

constexpr std::string_view kCall = "select_experts";

Status bad_option(std::string_view name, const std::string& observed, const std::string& expected,
                  std::string_view hint) {
  return bad_argument({kCall, name}, observed, expected, hint);
}

template <typename Enum>
Status bad_enumerator(std::string_view name, Enum value, const std::string& expected) {
  return bad_option(name, std::to_string(static_cast<int>(value)), expected, "pass an enumerator");
}

Status validate_enumerators(const GatingOptions& options) {
  if (options.score != GatingScore::kSoftmax && options.score != GatingScore::kSigmoid &&
      options.score != GatingScore::kSoftmaxOfChosen)
    return bad_enumerator("options.score", options.score, "kSoftmax, kSigmoid or kSoftmaxOfChosen");
  if (options.group_score != GatingGroupScore::kBestTwo && options.group_score != GatingGroupScore::kBest)
    return bad_enumerator("options.group_score", options.group_score, "kBestTwo or kBest");
  if (options.overflow != GatingOverflow::kDrop && options.overflow != GatingOverflow::kRechoose)
    return bad_enumerator("options.overflow", options.overflow, "kDrop or kRechoose");
  return {};
}

Status validate_selection(const GatingOptions& options, std::int64_t num_experts) {
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
  if (options.num_topk > kMaxTopk)
    return bad_option("options.num_topk", std::to_string(options.num_topk), fmt::format("at most {}", kMaxTopk),
                      "choose fewer experts per token");
  return {};
}

Status validate_numbers(const GatingOptions& options) {
  if (!std::isfinite(options.scale))
    return bad_option("options.scale", fmt::format("{}", options.scale), "finite", "1 leaves weights as they are");
  if (!std::isfinite(options.epsilon) || options.epsilon < 0)
    return bad_option("options.epsilon", fmt::format("{}", options.epsilon), "finite and not below 0",
                      "0 adds nothing");
  if (!std::isfinite(options.noise) || options.noise < 0)
    return bad_option("options.noise", fmt::format("{}", options.noise), "finite and not below 0", "0 means none");
  if (options.capacity < 0)
    return bad_option("options.capacity", std::to_string(options.capacity), "not below 0", "0 means no limit");
  return {};
}

Status validate_options(const GatingOptions& options, std::int64_t num_experts) {
  if (Status status = validate_enumerators(options); !status.ok()) return status;
  if (Status status = validate_selection(options, num_experts); !status.ok()) return status;
  return validate_numbers(options);
}

Status check_dtype(const ConstTensorView& view, const MatrixRule& rule, DType dtype) {
  if (view.dtype == dtype) return {};
  return bad_argument(rule, std::string(to_string(view.dtype)), std::string(to_string(dtype)), "convert it first");
}

/// Checks [E], contiguous. `rule` names the argument.
Status check_per_expert(const ConstTensorView& view, const MatrixRule& rule, std::int64_t num_experts) {
  if (view.num_dims != 1 || view.extent(0) != num_experts)
    return bad_argument(rule, view.present() ? numeric::shape_text(view) : "absent", fmt::format("[{}]", num_experts),
                        "one value per expert");
  if (num_experts > 1 && view.stride(0) != 1)
    return bad_argument(rule, fmt::format("of stride {}", view.stride(0)), "contiguous", "make it contiguous");
  // The pointer is checked like that of a matrix of one row.
  return check_matrix(ConstTensorView(view.data, view.dtype, {1, num_experts}), {rule.call, rule.name, 1, num_experts});
}

Status validate_bias(const ConstTensorView& bias, std::int64_t num_experts) {
  if (!bias.present()) return {};
  const MatrixRule rule{kCall, "bias"};
  if (Status status = check_per_expert(bias, rule, num_experts); !status.ok()) return status;
  return check_dtype(bias, rule, DType::kFloat32);
}

Status validate_logits(const ConstTensorView& logits, const MatrixRule& rule) {
  if (Status status = check_matrix(logits, rule); !status.ok()) return status;
  if (logits.dtype != DType::kFloat32 && logits.dtype != DType::kBfloat16)
    return bad_argument(rule, std::string(to_string(logits.dtype)), "f32 or bf16", "convert it first");
  if ((rule.cols > 1 && logits.stride(1) != 1) || (rule.rows > 1 && logits.stride(0) != rule.cols))
    return bad_argument(rule, fmt::format("of strides [{}, {}]", logits.stride(0), logits.stride(1)),
                        fmt::format("contiguous, [{}, 1]", rule.cols), "make it contiguous");
  return {};
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

  const MatrixRule idx_rule{kCall, "topk_idx", num_tokens, options.num_topk};
  const MatrixRule weights_rule{kCall, "topk_weights", num_tokens, options.num_topk};
  if (Status status = validate_logits(logits, {kCall, "logits", num_tokens, num_experts}); !status.ok()) return status;
  if (Status status = validate_bias(bias, num_experts); !status.ok()) return status;
  if (Status status = check_output_matrix(topk_idx, idx_rule); !status.ok()) return status;
  if (topk_idx.dtype != DType::kInt32 && topk_idx.dtype != DType::kInt64)
    return bad_argument(idx_rule, std::string(to_string(topk_idx.dtype)), "i32 or i64", "give a view of that dtype");
  if (Status status = check_output_matrix(topk_weights, weights_rule); !status.ok()) return status;
  return check_dtype(topk_weights, weights_rule, DType::kFloat32);
}

constexpr std::string_view kUpdateCall = "update_gating_bias";
/// Bound on sums of loads, so that E times a load does not overflow for any E in use.
constexpr std::int64_t kMaxTotalLoad = std::int64_t{1} << 53;

std::int64_t load_of(const ConstTensorView& load, std::int64_t expert) {
  if (load.dtype == DType::kInt32) return static_cast<const std::int32_t*>(load.data)[expert];
  return static_cast<const std::int64_t*>(load.data)[expert];
}

/// -1, 0 or 1 if load * num_experts is below, equal to or above `total`, without overflow.
int compare_to_mean(std::int64_t load, std::int64_t num_experts, std::int64_t total) {
  const std::int64_t mean = total / num_experts;
  const std::int64_t rest = total % num_experts;
  if (load != mean) return load < mean ? -1 : 1;
  return rest == 0 ? 0 : -1;
}

Result<std::int64_t> total_load(const ConstTensorView& load) {
  std::int64_t total = 0;
  for (std::int64_t expert = 0; expert < load.extent(0); ++expert) {
    const std::int64_t one = load_of(load, expert);
    if (one < 0 || one >= kMaxTotalLoad - total)
      return bad_argument({kUpdateCall, "load"}, fmt::format("{} of expert {}", one, expert),
                          "counts from 0 that sum to less than 2^53", "give the tokens that each expert received");
    total += one;
  }
  return total;
}

}  // namespace

Status select_experts(const ConstTensorView& logits, const ConstTensorView& bias, const GatingOptions& options,
                      const TensorView& topk_idx, const TensorView& topk_weights, const ExecutionOptions& execution,
                      Stream stream) {
  if (Status status = validate(logits, bias, options, topk_idx, topk_weights); !status.ok()) return status;
  const Result<const LocalOps*> ops = find_local_ops(kCall, execution.backend);
  if (!ops.ok()) return ops.status();
  const numeric::GatingParams params{
      .options = options,
      .num_tokens = logits.extent(0),
      .num_experts = static_cast<int>(logits.extent(1)),
      .logits = logits.data,
      .is_bfloat16 = logits.dtype == DType::kBfloat16,
      .bias = bias.present() ? static_cast<const float*>(bias.data) : nullptr,
      .ids = topk_idx.data,
      .wide_ids = topk_idx.dtype == DType::kInt64,
      .ids_row_stride = topk_idx.stride(0),
      .ids_column_stride = topk_idx.stride(1),
      .weights = static_cast<float*>(topk_weights.data),
      .weights_row_stride = topk_weights.stride(0),
      .weights_column_stride = topk_weights.stride(1),
  };
  return (*ops)->select_experts({kCall, execution.device, stream}, params);
}

Status update_gating_bias(const TensorView& bias, const ConstTensorView& load, float rate) {
  const std::int64_t num_experts = bias.num_dims == 1 ? bias.extent(0) : 0;
  if (num_experts < 1)
    return bad_argument({kUpdateCall, "bias"}, bias.present() ? numeric::shape_text(bias) : "absent", "[E], E >= 1",
                        "one value per expert");
  if (Status status = check_per_expert(bias, {kUpdateCall, "bias"}, num_experts); !status.ok()) return status;
  if (Status status = check_dtype(bias, {kUpdateCall, "bias"}, DType::kFloat32); !status.ok()) return status;
  const MatrixRule load_rule{kUpdateCall, "load"};
  if (Status status = check_per_expert(load, load_rule, num_experts); !status.ok()) return status;
  if (load.dtype != DType::kInt32 && load.dtype != DType::kInt64)
    return bad_argument(load_rule, std::string(to_string(load.dtype)), "i32 or i64", "give a view of that dtype");
  if (!std::isfinite(rate) || rate < 0)
    return bad_argument({kUpdateCall, "rate"}, fmt::format("{}", rate), "finite and not below 0", "0 changes nothing");
  const Result<std::int64_t> total = total_load(load);
  if (!total.ok()) return total.status();
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    const int side = compare_to_mean(load_of(load, expert), num_experts, *total);
    static_cast<float*>(bias.data)[expert] -= static_cast<float>(side) * rate;
  }
  return {};
}

}  // namespace ferry
