#ifndef FERRY_TOOLS_LAUNCH_RANKS_HPP
#define FERRY_TOOLS_LAUNCH_RANKS_HPP

/// Runs one function as every rank of a new group on this host; ranks are forked processes or threads of this one.

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

/// Main function of a rank, called once its bootstrap is connected or has failed. Returns the rank's report to the
/// caller of the run; empty if there is nothing to report, which is success.
using RankMain = std::function<std::string(int rank, Result<std::shared_ptr<Bootstrap>> bootstrap)>;

/// End of a rank.
struct RankEnd {
  std::string report;
  ProcessEnd process;      ///< a rank process with a report exits with 1
  bool timed_out = false;  ///< still ran at the deadline and was killed
  bool stopped = false;    ///< still ran when the run was given up, and was killed
};

inline constexpr std::int64_t kNoTimeout = std::numeric_limits<std::int64_t>::max();

struct RankProcesses {
  int num_ranks = 1;
  std::int64_t bootstrap_timeout_ns = kDefaultTimeoutNs;
  /// Deadline of the whole run; ranks that still run then are killed.
  std::int64_t run_timeout_ns = kNoTimeout;
  /// Called when a rank ends: returns how long the run waits for the next end before it gives up. Empty: no limit.
  std::function<std::int64_t(int rank, const RankEnd& end)> patience_ns{};
};

/// Forks the ranks and waits for them. Call it while this process has one thread. SIGINT, SIGTERM and SIGHUP kill and
/// reap the ranks, then end this process with their default effect; if the parent is killed, its ranks are killed too.
/// @return the end of each rank, by rank
/// @errors kSystem: not all ranks could be started; the others have been killed
Result<std::vector<RankEnd>> run_rank_processes(const RankProcesses& run, const RankMain& rank_main);

/// Runs the ranks as threads and waits for them. Threads cannot be killed: if ranks still run after `run_timeout_ns`,
/// they are named on standard error and the program is aborted.
/// @errors as create_in_process_bootstraps; kSystem: not all threads could be started; the other ranks have ended
Result<std::vector<RankEnd>> run_rank_threads(int num_ranks, std::int64_t run_timeout_ns, const RankMain& rank_main);

}  // namespace ferry::launch

#endif  // FERRY_TOOLS_LAUNCH_RANKS_HPP
