#ifndef FERRY_TOOLS_RUN_LAUNCH_PLAN_HPP
#define FERRY_TOOLS_RUN_LAUNCH_PLAN_HPP

/// Start of the ranks: by this command, as processes or threads, or by a launcher that started this process as a rank.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::tools {

/// Values of --launch.
enum class LaunchMode {
  kAuto = 0,         ///< kEnvironment if a launcher started more than one rank, otherwise kFork
  kFork = 1,         ///< forks all ranks here, even inside a launcher
  kEnvironment = 2,  ///< this process is one rank of a launcher
  kThreads = 3,      ///< all ranks are threads of this process
};

/// Options of the user; absent if not given.
struct LaunchRequest {
  LaunchMode mode = LaunchMode::kAuto;
  std::optional<int> num_ranks;
  std::optional<int> num_nodes;
  int default_num_ranks = 1;  ///< if ranks are forked
  std::int64_t timeout_ns = kDefaultTimeoutNs;
};

/// How the ranks of this run are started.
struct LaunchPlan {
  bool from_environment = false;
  bool as_threads = false;  ///< only if not from the environment
  int num_ranks = 1;
  int num_nodes = 1;                  ///< each with equally many ranks
  int num_hosts = 1;                  ///< fewer than nodes if several nodes are emulated on a host
  TcpBootstrapOptions bootstrap;      ///< kEnvironment only
  std::shared_ptr<Bootstrap> joined;  ///< kEnvironment: the ranks have met already, because nothing gave num_hosts
  std::string description;            ///< one sentence for the user

  int ranks_per_node() const { return num_ranks / num_nodes; }
  /// False in a launcher's ranks other than 0, which print nothing.
  bool reports_here() const { return !from_environment || bootstrap.rank == 0; }
};

/// Makes the decision once, before anything is started. Without a number of nodes, each host of a launcher is a node.
/// If no variable gives the number of hosts, the launcher's ranks meet and count them.
/// @errors kInvalidArgument: too few or too many ranks, ranks or hosts that cannot be spread evenly over the nodes,
///         a launcher that disagrees with the request, or variables that are missing or malformed; others as
///         create_tcp_bootstrap
Result<LaunchPlan> plan_launch(const LaunchRequest& request);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_LAUNCH_PLAN_HPP
