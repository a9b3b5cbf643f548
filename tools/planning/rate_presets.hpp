#ifndef FERRY_TOOLS_PLANNING_RATE_PRESETS_HPP
#define FERRY_TOOLS_PLANNING_RATE_PRESETS_HPP

/// Built-in rates. Those of recorded runs are computed from the figures in these runs' files; a test repeats that.

#include <optional>
#include <string_view>

#include "planning/rates.hpp"

namespace ferry::tools {

/// None if `name` is no preset.
std::optional<Rates> preset_rates(std::string_view name);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_PLANNING_RATE_PRESETS_HPP
