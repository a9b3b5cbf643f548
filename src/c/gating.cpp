/// C interface of gating: router logits to experts.

#include "ferry/gating.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "c/convert.hpp"
#include "c/status.hpp"
#include "c/structs.hpp"

namespace ferry::c {
namespace {

static_assert(FERRY_SCORE_SOFTMAX == static_cast<int>(GatingScore::kSoftmax));
static_assert(FERRY_SCORE_SIGMOID == static_cast<int>(GatingScore::kSigmoid));
static_assert(FERRY_SCORE_SOFTMAX_OF_CHOSEN == static_cast<int>(GatingScore::kSoftmaxOfChosen));
static_assert(FERRY_GROUP_SCORE_BEST_TWO == static_cast<int>(GatingGroupScore::kBestTwo));
static_assert(FERRY_GROUP_SCORE_BEST == static_cast<int>(GatingGroupScore::kBest));
static_assert(FERRY_OVERFLOW_DROP == static_cast<int>(GatingOverflow::kDrop));
static_assert(FERRY_OVERFLOW_RECHOOSE == static_cast<int>(GatingOverflow::kRechoose));

GatingOptions to_options(const ferry_gating_options& read) {
  GatingOptions options;
  options.score = static_cast<GatingScore>(read.score);
  options.num_topk = nonzero_or(read.num_topk, options.num_topk);
  options.num_groups = nonzero_or(read.num_groups, options.num_groups);
  options.num_selected_groups = nonzero_or(read.num_selected_groups, options.num_selected_groups);
  options.normalize = read.keep_sum == 0;
  options.scale = nonzero_or(read.scale, options.scale);
  options.group_score = static_cast<GatingGroupScore>(read.group_score);
  options.epsilon = read.epsilon;
  options.capacity = read.capacity;
  options.overflow = static_cast<GatingOverflow>(read.overflow);
  options.noise = read.noise;
  options.noise_seed = read.noise_seed;
  options.first_token = read.first_token;
  return options;
}

ferry_gating_options from_options(const GatingOptions& options) {
  ferry_gating_options known{};
  known.capacity = options.capacity;
  known.noise_seed = options.noise_seed;
  known.first_token = options.first_token;
  known.score = static_cast<std::int32_t>(options.score);
  known.group_score = static_cast<std::int32_t>(options.group_score);
  known.overflow = static_cast<std::int32_t>(options.overflow);
  known.num_topk = options.num_topk;
  known.num_groups = options.num_groups;
  known.num_selected_groups = options.num_selected_groups;
  known.keep_sum = options.normalize ? 0 : 1;
  known.scale = options.scale;
  known.epsilon = options.epsilon;
  known.noise = options.noise;
  return known;
}

Status select(const ferry_tensor* logits, const ferry_tensor* bias, const ferry_gating_options* given_options,
              const ferry_tensor* topk_idx, const ferry_tensor* topk_weights,
              const ferry_execution_options* given_execution, void* stream) {
  constexpr const char* kCall = "ferry_select_experts";
  ferry_gating_options read;
  if (Status status = read_struct(kCall, given_options, read); !status.ok()) return status;
  ferry_execution_options where;
  if (Status status = read_struct(kCall, given_execution, where); !status.ok()) return status;
  return select_experts(tensor_view(logits), tensor_view(bias), to_options(read), tensor_view(topk_idx),
                        tensor_view(topk_weights), to_execution(where), to_stream(stream));
}

Status fill_preset(const char* name, ferry_gating_options* options, std::int64_t* num_experts, std::int32_t* has_bias) {
  constexpr const char* kCall = "ferry_gating_preset";
  const GatingPreset* preset = name != nullptr ? find_gating_preset(name) : nullptr;
  if (preset == nullptr) {
    std::string message = fmt::format("{}: \"{}\" is not a preset, expected one of:", kCall, text_or(name, ""));
    for (const GatingPreset& one : gating_presets()) message.append(" ").append(one.name);
    return Status(ErrorCode::kInvalidArgument, std::move(message));
  }
  if (options != nullptr) {
    if (Status status = write_struct(kCall, from_options(preset->options), options); !status.ok()) return status;
  }
  if (num_experts != nullptr) *num_experts = preset->num_experts;
  if (has_bias != nullptr) *has_bias = preset->has_bias ? 1 : 0;
  return {};
}

}  // namespace
}  // namespace ferry::c

using namespace ferry::c;

ferry_status* ferry_select_experts(const ferry_tensor* logits, const ferry_tensor* bias,
                                   const ferry_gating_options* options, const ferry_tensor* topk_idx,
                                   const ferry_tensor* topk_weights, const ferry_execution_options* execution,
                                   void* stream) {
  return guarded([&] { return select(logits, bias, options, topk_idx, topk_weights, execution, stream); });
}

ferry_status* ferry_update_gating_bias(const ferry_tensor* bias, const ferry_tensor* load, float rate) {
  return guarded([&] { return ferry::update_gating_bias(tensor_view(bias), tensor_view(load), rate); });
}

ferry_status* ferry_gating_preset(const char* name, ferry_gating_options* options, int64_t* num_experts,
                                  int32_t* has_bias) {
  return guarded([&] { return fill_preset(name, options, num_experts, has_bias); });
}
