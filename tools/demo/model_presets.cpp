#include "demo/model_presets.hpp"

#include <algorithm>
#include <array>
#include <cctype>

namespace ferry::tools {

namespace {

/// Softmax over the chosen experts only is softmax over all of them, divided by the sum of the chosen.
constexpr GatingOptions softmax_of_chosen(int num_topk) {
  return {.score = GatingScore::kSoftmax, .num_topk = num_topk, .normalize = true};
}

constexpr std::array<ModelPreset, 6> kPresets = {{
    {.name = "deepseek-v3",
     .hidden = 7168,
     .intermediate = 2048,
     .num_experts = 256,
     .gating = {.score = GatingScore::kSigmoid,
                .num_topk = 8,
                .num_groups = 8,
                .num_selected_groups = 4,
                .normalize = true,
                .scale = 2.5F},
     .selectable = true},
    {.name = "qwen3-235b",
     .hidden = 4096,
     .intermediate = 1536,
     .num_experts = 128,
     .gating = softmax_of_chosen(8),
     .selectable = true},
    {.name = "kimi-k2",
     .hidden = 7168,
     .intermediate = 2048,
     .num_experts = 384,
     .gating = {.score = GatingScore::kSigmoid, .num_topk = 8, .normalize = true, .scale = 2.827F},
     .selectable = true},
    {.name = "gpt-oss-120b",
     .hidden = 2880,
     .intermediate = 2880,
     .num_experts = 128,
     .gating = softmax_of_chosen(4),
     .selectable = true},
    {.name = "mixtral-8x7b",
     .hidden = 4096,
     .intermediate = 14336,
     .num_experts = 8,
     .gating = softmax_of_chosen(2),
     .selectable = true},
    {.name = "qwen1.5-moe-a2.7b",
     .hidden = 2048,
     .intermediate = 1408,
     .num_experts = 60,
     .gating = {.score = GatingScore::kSoftmax, .num_topk = 4, .normalize = false},
     .selectable = false},
}};

std::int64_t divide_down_to(std::int64_t size, std::int64_t scale, std::int64_t multiple) {
  return std::max(multiple, size / scale / multiple * multiple);
}

}  // namespace

std::span<const ModelPreset> model_presets() { return kPresets; }

const ModelPreset* find_preset(std::string_view name) {
  const auto* found =
      std::find_if(kPresets.begin(), kPresets.end(), [&](const auto& preset) { return preset.name == name; });
  return found == kPresets.end() ? nullptr : found;
}

const ModelPreset* recognise_preset(std::string_view model) {
  std::string lower(model);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto* found = std::find_if(kPresets.begin(), kPresets.end(),
                                   [&](const auto& preset) { return lower.find(preset.name) != std::string::npos; });
  return found == kPresets.end() ? nullptr : found;
}

LayerShape scaled_shape(const ModelPreset& preset, std::int64_t scale) {
  LayerShape shape;
  shape.model = preset.name;
  shape.scale = scale;
  shape.hidden = divide_down_to(preset.hidden, scale, kHiddenMultiple);
  shape.intermediate = divide_down_to(preset.intermediate, scale, 1);
  shape.num_experts = preset.num_experts;
  shape.gating = preset.gating;
  return shape;
}

}  // namespace ferry::tools
