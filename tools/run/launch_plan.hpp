#ifndef FERRY_TOOLS_RUN_LAUNCH_PLAN_HPP
#define FERRY_TOOLS_RUN_LAUNCH_PLAN_HPP

/// Who starts the ranks: this command, as processes or threads, or a launcher that started this process as a rank.

#include <optional>
#include <string>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

/// What the user asks for with --launch.
enum class LaunchMode {
  kAuto = 0,         ///< kEnvironment where a launcher started more than one rank, kFork elsewhere
  kFork = 1,         ///< fork all ranks here, whatever the environment says
  kEnvironment = 2,  ///< this process is one rank of a launcher's
  kThreads = 3,      ///< all ranks are threads of this process
};

/// What the user asks for; absent where nothing.
struct LaunchRequest {
  LaunchMode mode = LaunchMode::kAuto;
  std::optional<int> num_ranks;
  std::optional<int> num_nodes;
  int default_num_ranks = 1;  ///< where ranks are forked
};

/// How the ranks of this run come to be.
struct LaunchPlan {
  bool from_environment = false;
  bool as_threads = false;  ///< and not from the environment
  int num_ranks = 1;
  int num_nodes = 1;              ///< each with as many ranks as the others
  int num_hosts = 1;              ///< fewer than nodes where several nodes are emulated on a host
  TcpBootstrapOptions bootstrap;  ///< kEnvironment only
  std::string description;        ///< one sentence for the user

  int ranks_per_node() const { return num_ranks / num_nodes; }
  /// False in a launcher's ranks other than 0, which say nothing.
  bool reports_here() const { return !from_environment || bootstrap.rank == 0; }
};

/// Decide once, before anything is started. Without a number of nodes, each host of a launcher is one.
/// @errors kInvalidArgument: fewer than one or too many ranks, nodes that ranks or hosts cannot be spread over evenly,
///         a launcher that disagrees with the request, or variables that are missing or malformed
Result<LaunchPlan> plan_launch(const LaunchRequest& request);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_LAUNCH_PLAN_HPP
