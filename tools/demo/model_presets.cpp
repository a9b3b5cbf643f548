#include "demo/model_presets.hpp"

#include <algorithm>
#include <array>
#include <cctype>

namespace ferry::tools {

namespace {

/// E and gate are those of the library's preset of this name.
ModelPreset published(std::string_view name, std::int64_t hidden, std::int64_t intermediate) {
  const GatingPreset& gate = *find_gating_preset(name);
  return {name, hidden, intermediate, gate.num_experts, gate.options, true};
}

std::int64_t divide_down_to(std::int64_t size, std::int64_t scale, std::int64_t multiple) {
  return std::max(multiple, size / scale / multiple * multiple);
}

}  // namespace

std::span<const ModelPreset> model_presets() {
  static const std::array<ModelPreset, 6> presets = {{
      published("deepseek-v3", 7168, 2048),
      published("qwen3-235b", 4096, 1536),
      published("kimi-k2", 7168, 2048),
      published("gpt-oss-120b", 2880, 2880),
      published("mixtral-8x7b", 4096, 14336),
      {.name = "qwen1.5-moe-a2.7b",
       .hidden = 2048,
       .intermediate = 1408,
       .num_experts = 60,
       .gating = {.score = GatingScore::kSoftmax, .num_topk = 4, .normalize = false},
       .selectable = false},
  }};
  return presets;
}

const ModelPreset* find_preset(std::string_view name) {
  const auto presets = model_presets();
  const auto found =
      std::find_if(presets.begin(), presets.end(), [&](const auto& preset) { return preset.name == name; });
  return found == presets.end() ? nullptr : &*found;
}

const ModelPreset* recognise_preset(std::string_view model) {
  std::string lower(model);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto presets = model_presets();
  const auto found = std::find_if(presets.begin(), presets.end(),
                                  [&](const auto& preset) { return lower.find(preset.name) != std::string::npos; });
  return found == presets.end() ? nullptr : &*found;
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
