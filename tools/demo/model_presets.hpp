#ifndef FERRY_TOOLS_DEMO_MODEL_PRESETS_HPP
#define FERRY_TOOLS_DEMO_MODEL_PRESETS_HPP

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "ferry/gating.hpp"

namespace ferry::tools {

/// The MoE layer of a published model.
struct ModelPreset {
  std::string_view name;      ///< value of --model
  std::int64_t hidden;        ///< H
  std::int64_t intermediate;  ///< per expert
  std::int64_t num_experts;   ///< E, routed experts
  GatingOptions gating;
  bool selectable;  ///< offered by --model; other presets are only recognised in traces
};

/// All known models. @source the config.json that each model is published with
std::span<const ModelPreset> model_presets();

/// Finds a preset by its exact name; null if there is none.
const ModelPreset* find_preset(std::string_view name);

/// Finds the preset whose name `model` contains, ignoring case ("Qwen1.5-MoE-A2.7B-Chat"); null if there is none.
const ModelPreset* recognise_preset(std::string_view model);

/// Layer that the demo computes.
struct LayerShape {
  std::string model;
  std::int64_t scale = 1;   ///< divisor of the model's sizes
  std::int64_t hidden = 0;  ///< H, a multiple of kHiddenMultiple
  std::int64_t intermediate = 0;
  std::int64_t num_experts = 0;  ///< E
  GatingOptions gating;
  int num_topk() const { return gating.num_topk; }
};

/// Makes rows of fp8 and of bf16 whole 16-byte granules.
inline constexpr std::int64_t kHiddenMultiple = 16;

/// Divides the sizes of a model by `scale`, rounded down to valid row sizes, at least one granule.
LayerShape scaled_shape(const ModelPreset& preset, std::int64_t scale);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_DEMO_MODEL_PRESETS_HPP
