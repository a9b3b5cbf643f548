#ifndef FERRY_TOOLS_RUN_RUN_OPTIONS_HPP
#define FERRY_TOOLS_RUN_RUN_OPTIONS_HPP

/// Options that demo and bench share.

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ferry/group.hpp"
#include "run/launch_plan.hpp"

namespace ferry::tools {

struct CommonOptions {
  std::optional<int> num_ranks;
  std::optional<int> num_nodes;
  std::string backend = "auto";
  std::string transport = "auto";
  std::string net_devices;  ///< GroupOptions::net_devices
  std::string ring_memory = "auto";
  bool verify = false;  ///< GroupOptions::verify
  LaunchMode launch = LaunchMode::kAuto;
  double timeout_s = 120.0;
  std::uint64_t arena_bytes = kDefaultArenaBytes;
  std::uint64_t seed = 1;

  LaunchRequest launch_request() const;
  std::int64_t timeout_ns() const { return static_cast<std::int64_t>(timeout_s * 1e9); }
};

inline constexpr int kDefaultNumRanks = 8;

void add_common_options(CLI::App& command, CommonOptions* options);
/// For commands whose calls may be verified.
void add_verify_option(CLI::App& command, CommonOptions* options);

/// Name of the backend; for "auto" the best one that works here over this many nodes. Also refuses backends that this
/// build does not have.
/// @errors kUnsupported: no backend works here; kInvalidArgument: no such backend
Result<std::string> resolve_backend(const CommonOptions& options, int num_nodes);

/// Checks that --transport can join nodes here. Ok with one node, which needs no network.
/// @errors kUnsupported: the message names the reason and the remedy
Status check_transport(const CommonOptions& options, int num_nodes);

/// Checks that `what`, a file that is written after the run, can be written: call it before the run, on every rank that
/// shares the reporter's host.
/// @errors kSystem
Status check_output(const std::string& path, const LaunchPlan& launch, std::string_view what = "the report");

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_RUN_OPTIONS_HPP
