#include <algorithm>
#include <array>

#include "ferry/gating.hpp"

namespace ferry {
namespace {

/// Term that DeepSeek's and Moonshot's own modelling code adds to the sum of the chosen scores.
/// @source huggingface.co/deepseek-ai/DeepSeek-V3, modeling_deepseek.py, class MoEGate (moonshotai/Kimi-K2-Instruct
/// runs the same file). DeepSeek's inference/model.py on GitHub adds nothing.
constexpr float kDeepSeekEpsilon = 1e-20F;

/// Numbers from each model's config.json on huggingface.co, rules from the code named by `source`.
constexpr std::array<GatingPreset, 5> kPresets = {{
    {.name = "deepseek-v3",
     .num_experts = 256,
     .has_bias = true,
     .options = {.score = GatingScore::kSigmoid,
                 .num_topk = 8,
                 .num_groups = 8,
                 .num_selected_groups = 4,
                 .normalize = true,
                 .scale = 2.5F,
                 .group_score = GatingGroupScore::kBestTwo,
                 .epsilon = kDeepSeekEpsilon},
     .source = "DeepSeek-V3 technical report (arXiv 2412.19437), section 2.1.2; "
               "huggingface.co/deepseek-ai/DeepSeek-V3, config.json and MoEGate of modeling_deepseek.py"},
    {.name = "kimi-k2",
     .num_experts = 384,
     .has_bias = true,
     .options = {.score = GatingScore::kSigmoid,
                 .num_topk = 8,
                 .normalize = true,
                 .scale = 2.827F,
                 .epsilon = kDeepSeekEpsilon},
     .source = "huggingface.co/moonshotai/Kimi-K2-Instruct, config.json (n_group 1) and MoEGate of "
               "modeling_deepseek.py"},
    {.name = "qwen3-235b",
     .num_experts = 128,
     .options = {.score = GatingScore::kSoftmax, .num_topk = 8, .normalize = true},
     .source = "huggingface.co/Qwen/Qwen3-235B-A22B, config.json (norm_topk_prob); transformers, qwen3_moe"},
    {.name = "gpt-oss-120b",
     .num_experts = 128,
     .options = {.score = GatingScore::kSoftmaxOfChosen, .num_topk = 4},
     .source = "github.com/openai/gpt-oss, the reference model's class MLPBlock: top-k of the gate's outputs, then "
               "softmax"},
    {.name = "mixtral-8x7b",
     .num_experts = 8,
     .options = {.score = GatingScore::kSoftmaxOfChosen, .num_topk = 2},
     .source = "Mixtral of Experts (arXiv 2401.04088), section 2.1; github.com/mistralai/mistral-inference, moe.py"},
}};

}  // namespace

std::span<const GatingPreset> gating_presets() { return kPresets; }

const GatingPreset* find_gating_preset(std::string_view name) {
  const auto* found =
      std::find_if(kPresets.begin(), kPresets.end(), [&](const GatingPreset& preset) { return preset.name == name; });
  return found == kPresets.end() ? nullptr : found;
}

}  // namespace ferry
