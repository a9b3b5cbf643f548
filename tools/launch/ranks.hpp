#ifndef FERRY_TOOLS_LAUNCH_RANKS_HPP
#define FERRY_TOOLS_LAUNCH_RANKS_HPP

/// Runs one function as every rank of a new group on this host, ranks being forked processes or threads of this one.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"
#include "launch/child_process.hpp"

namespace ferry::launch {

/// What a rank runs, once its bootstrap is connected or has failed. Returns what it reports to the caller of the run;
/// empty where it has nothing to report, which is success.
using RankMain = std::function<std::string(int rank, Result<std::shared_ptr<Bootstrap>> bootstrap)>;

/// How a rank ended.
struct RankEnd {
  std::string report;
  ProcessEnd process;      ///< a rank process that reports something exits with 1
  bool timed_out = false;  ///< still ran at the deadline and was killed
  bool stopped = false;    ///< still ran when the run was given up, and was killed
};

inline constexpr std::int64_t kNoTimeout = std::numeric_limits<std::int64_t>::max();

struct RankProcesses {
  int num_ranks = 1;
  std::int64_t bootstrap_timeout_ns = kDefaultTimeoutNs;
  /// For the whole run; ranks that still run then are killed.
  std::int64_t run_timeout_ns = kNoTimeout;
  /// Called as each rank ends: how long the run waits for the next one to end before it is given up. Empty: to the end.
  std::function<std::int64_t(int rank, const RankEnd& end)> patience_ns{};
};

/// Forks the ranks and waits for them. Call it while this process has one thread. SIGINT, SIGTERM and SIGHUP kill and
/// reap the ranks, then end this process as they would have; a killed parent takes its ranks with it.
/// @return how each rank ended, by rank
/// @errors kSystem: the ranks could not all be started; those that were have been killed
Result<std::vector<RankEnd>> run_rank_processes(const RankProcesses& run, const RankMain& rank_main);

/// Runs the ranks as threads and waits for them. Threads cannot be killed: ranks that still run after `run_timeout_ns`
/// are named on standard error and the program is aborted.
/// @errors as create_in_process_bootstraps
Result<std::vector<RankEnd>> run_rank_threads(int num_ranks, std::int64_t run_timeout_ns, const RankMain& rank_main);

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_RANKS_HPP
