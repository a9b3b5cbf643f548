#include "run/forked_ranks.hpp"

#include <fmt/format.h>

#include <csignal>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "device/rank_device.hpp"
#include "launch/ranks.hpp"
#include "launch/status_report.hpp"

namespace ferry::tools {

namespace {

/// Parts of the area start on their own cache lines (64 bytes on x86-64 and most AArch64; 128 on some of the latter).
constexpr std::size_t kPartAlignment = 128;

std::size_t round_up(std::size_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

/// [ barrier | result of rank 0 … R-1 ]
std::size_t result_offset(const RunOptions& options, int rank) {
  return round_up(sizeof(launch::SharedBarrier)) + static_cast<std::size_t>(rank) * round_up(options.result_bytes);
}

/// Failure that best explains the others, and the time to wait for a better one.
class FirstCause {
 public:
  /// @return time to wait for the next rank to end
  std::int64_t take(int rank, const launch::RankEnd& end) {
    if (!end.process.clean() || !end.report.empty()) {
      Status status = describe(rank, end);
      const bool is_of_peer = status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kTimeout;
      const Cause cause = end.process.signal != 0 ? Cause::kDied : is_of_peer ? Cause::kPeer : Cause::kOwn;
      if (cause > cause_) {
        cause_ = cause;
        status_ = std::move(status);
      }
    }
    // A rank that only lost a peer points at another rank, which ends within this time.
    constexpr std::int64_t kGraceNs = 500'000'000;
    return cause_ == Cause::kNone ? launch::kNoTimeout : cause_ == Cause::kPeer ? kGraceNs : 0;
  }

  const Status& status() const { return status_; }

 private:
  /// Cause of a rank's failure, in ascending order of how much it explains.
  enum class Cause { kNone, kPeer, kOwn, kDied };

  static Status describe(int rank, const launch::RankEnd& end) {
    if (const int signal = end.process.signal; signal != 0) {
      const char* hint =
          signal == SIGKILL ? "; unless you killed it, the machine ran out of memory: use fewer tokens" : "";
      return {ErrorCode::kPeerLost,
              fmt::format("rank {} was killed by signal {} ({}){}", rank, signal, strsignal(signal), hint), rank};
    }
    const Status reported = launch::decode_status(end.report);
    if (reported.ok()) {
      return {ErrorCode::kPeerLost, fmt::format("rank {} exited with code {}", rank, end.process.exit_code), rank};
    }
    // A rank that reports the failure of another one in that rank's words is not the one to name.
    std::string_view words = reported.message();
    const std::string owner = fmt::format("rank {}: ", reported.peer());
    const bool names_owner = reported.peer() >= 0 && words.starts_with(owner);
    if (names_owner) words.remove_prefix(owner.size());
    const int failed = names_owner ? reported.peer() : rank;
    return {reported.code(), fmt::format("rank {} failed: {}: {}", failed, to_string(reported.code()), words), failed};
  }

  Cause cause_ = Cause::kNone;
  Status status_;
};

}  // namespace

std::span<std::byte> forked_rank_result(const launch::SharedArea& area, const RunOptions& options, int rank) {
  return area.bytes().subspan(result_offset(options, rank), options.result_bytes);
}

Result<launch::SharedArea> run_forked_ranks(const RunOptions& options,
                                            const std::function<Status(RankContext&)>& rank_main) {
  const int num_ranks = options.plan.num_ranks;
  auto area = launch::SharedArea::map(result_offset(options, num_ranks));
  if (!area) return area.status();
  auto* barrier = new (area->bytes().data()) launch::SharedBarrier();

  const auto run_rank = [&](int rank, Result<std::shared_ptr<Bootstrap>> bootstrap) -> Status {
    if (!bootstrap) return bootstrap.status();
    RankContext context(*bootstrap, forked_rank_result(*area, options, rank), barrier, options.timeout_ns);
    try {
      return rank_main(context);
    } catch (const std::bad_alloc&) {
      return {ErrorCode::kSystem, "the machine is out of memory; use fewer ranks, fewer tokens or a smaller layer"};
    } catch (const std::exception& error) {
      return {ErrorCode::kInternal, error.what()};
    }
  };

  FirstCause first_cause;
  if (options.plan.as_threads) {
    prepare_ranks_as_threads();
    const auto ends = launch::run_rank_threads(num_ranks, launch::kNoTimeout,
                                               [&](int rank, Result<std::shared_ptr<Bootstrap>> bootstrap) {
                                                 return launch::encode_status(run_rank(rank, std::move(bootstrap)));
                                               });
    if (!ends) return ends.status();
    for (int rank = 0; rank < num_ranks; ++rank) first_cause.take(rank, (*ends)[static_cast<std::size_t>(rank)]);
    if (!first_cause.status()) return first_cause.status();
    return std::move(*area);
  }
  launch::RankProcesses run;
  run.num_ranks = num_ranks;
  run.bootstrap_timeout_ns = options.timeout_ns;
  run.patience_ns = [&](int rank, const launch::RankEnd& end) { return first_cause.take(rank, end); };
  const auto ends = launch::run_rank_processes(run, [&](int rank, Result<std::shared_ptr<Bootstrap>> bootstrap) {
    return launch::encode_status(run_rank(rank, std::move(bootstrap)));
  });
  if (!ends) return ends.status();
  if (!first_cause.status()) return first_cause.status();
  return std::move(*area);
}

}  // namespace ferry::tools
