#ifndef FERRY_TOOLS_RUN_LAUNCHER_HPP
#define FERRY_TOOLS_RUN_LAUNCHER_HPP

/// Runs one function as every rank, each in its own process, and brings the results to the one process that reports.
///
///   forked:                parent ── fork ──> rank 0 … rank R-1      results: memory shared with the parent
///   started by a launcher: this process is one rank                  results: gathered through the bootstrap
///
/// The parent stays free of threads, ends the whole run as soon as one rank fails, and takes the ranks with it if it is
/// killed.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"
#include "launch/shared_area.hpp"
#include "run/launch_plan.hpp"

namespace ferry::tools {

/// Context of a rank's function.
class RankContext {
 public:
  RankContext(std::shared_ptr<Bootstrap> bootstrap, std::span<std::byte> result, launch::SharedBarrier* barrier,
              std::int64_t timeout_ns)
      : bootstrap_(std::move(bootstrap)), result_(result), barrier_(barrier), timeout_ns_(timeout_ns) {}

  int rank() const { return bootstrap_->rank(); }
  int num_ranks() const { return bootstrap_->num_ranks(); }
  const std::shared_ptr<Bootstrap>& bootstrap() const { return bootstrap_; }
  std::int64_t timeout_ns() const { return timeout_ns_; }
  /// Zeroed memory that the reporter sees once every rank has returned.
  std::span<std::byte> result() const { return result_; }
  /// All ranks leave together; they sleep while they wait.
  Status barrier();
  /// Barrier that returns the time (now_ns) at which the last rank arrived: all ranks can start together soon after
  /// this time, however long each takes to wake.
  Result<std::int64_t> line_up();
  /// Maximum over all ranks, returned to all.
  Result<std::int64_t> largest(std::int64_t mine);

 private:
  std::shared_ptr<Bootstrap> bootstrap_;
  std::span<std::byte> result_;
  launch::SharedBarrier* barrier_;  ///< null if the ranks share no memory
  std::int64_t timeout_ns_;
};

struct RunOptions {
  LaunchPlan plan;
  std::size_t result_bytes = 0;  ///< size of RankContext::result, the same on every rank
  std::int64_t timeout_ns = kDefaultTimeoutNs;
};

/// Results of the ranks.
class RunOutcome {
 public:
  /// True in the one process that prints: the parent of forked ranks, or rank 0 of a launcher.
  bool is_reporter() const { return bootstrap_ == nullptr || bootstrap_->rank() == 0; }
  std::span<const std::byte> result(int rank) const { return results_[static_cast<std::size_t>(rank)]; }
  /// Collective among a launcher's ranks: all of them exit with the reporter's exit code.
  Result<int> share_exit_code(int reporter_exit_code);

 private:
  friend Result<RunOutcome> run_ranks(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main);
  friend Result<RunOutcome> run_launched(const RunOptions& options,
                                         const std::function<Status(RankContext&)>& rank_main);
  friend Result<RunOutcome> run_forked(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main);
  launch::SharedArea area_;                       ///< forked
  std::vector<std::vector<std::byte>> gathered_;  ///< launched; separate vectors, so that every result is aligned
  std::shared_ptr<Bootstrap> bootstrap_;          ///< launched
  std::int64_t timeout_ns_ = 0;                   ///< launched
  std::vector<std::span<const std::byte>> results_;
};

/// Runs `rank_main` as every rank. Call it while this process has one thread.
/// @errors error of the first rank that failed, naming it; kPeerLost if a rank was killed. All other ranks have ended
///         by then. A signal that asks to end (SIGINT, SIGTERM, SIGHUP) ends the ranks and this process.
Result<RunOutcome> run_ranks(const RunOptions& options, const std::function<Status(RankContext&)>& rank_main);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_RUN_LAUNCHER_HPP
