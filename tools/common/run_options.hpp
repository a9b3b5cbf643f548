#ifndef FERRY_TOOLS_COMMON_RUN_OPTIONS_HPP
#define FERRY_TOOLS_COMMON_RUN_OPTIONS_HPP

/// Options that demo and bench share.

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "common/launch_plan.hpp"

namespace ferry::tools {

struct CommonOptions {
  std::optional<int> num_ranks;
  int num_nodes = 1;
  std::string backend = "auto";
  LaunchMode launch = LaunchMode::kAuto;
  double timeout_s = 120.0;
  std::uint64_t seed = 1;

  std::int64_t timeout_ns() const { return static_cast<std::int64_t>(timeout_s * 1e9); }
};

inline constexpr int kDefaultNumRanks = 8;

void add_common_options(CLI::App& command, CommonOptions* options);

/// The backend's name, "auto" being the best that works here. Also refuses what only the build can tell.
/// @errors kUnsupported: more than one node, or no backend works here; kInvalidArgument: no such backend
Result<std::string> resolve_backend(const CommonOptions& options);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_COMMON_RUN_OPTIONS_HPP
