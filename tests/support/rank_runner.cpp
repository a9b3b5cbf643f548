#include "support/rank_runner.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <exception>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "launch/ranks.hpp"

namespace ferry::test {
namespace {

/// A broken backend fails at every element; the first few failures are enough to diagnose it.
constexpr std::size_t kMaxFailuresPerRank = 8;

void run_body(const RankBody& body, RankContext& context) {
  try {
    body(context);
  } catch (const std::exception& error) {
    context.fail(fmt::format("threw: {}", error.what()));
  } catch (...) {
    context.fail("threw an object that is not a std::exception");
  }
}

/// Returns a rank's failures, each ended by a zero byte.
std::string run_rank(const RankRun& run, const RankBody& body, int rank, Result<std::shared_ptr<Bootstrap>> bootstrap) {
  if (!bootstrap.ok()) return bootstrap.status().to_string() + '\0';
  RankContext context(rank, run.num_ranks, std::move(*bootstrap));
  run_body(body, context);
  std::string report;
  for (const std::string& text : context.failures()) report += text + '\0';
  if (run.kind == RankKind::kProcesses && ::testing::Test::HasFailure()) {
    report += std::string("a GoogleTest assertion failed in this process") + '\0';
  }
  return report;
}

void add_failures(int rank, const launch::RankEnd& end, std::vector<std::string>& failures) {
  const auto add = [&](std::string_view text) { failures.push_back(fmt::format("rank {}: {}", rank, text)); };
  std::size_t begin = 0;
  for (std::size_t stop = 0; (stop = end.report.find('\0', begin)) != std::string::npos; begin = stop + 1) {
    add(end.report.substr(begin, stop - begin));
  }
  if (end.timed_out) {
    add("watchdog: still ran at the deadline and was killed");
  } else if (end.process.signal != 0) {
    add(fmt::format("died of signal {}", end.process.signal));
  } else if (end.process.exit_code != 0 && begin == 0) {
    add(fmt::format("exited with {}", end.process.exit_code));
  }
}

/// Fork copies only the calling thread; locks of other threads would stay locked forever in the child.
bool is_single_threaded() {
#ifdef FERRY_SANITIZER_THREAD
  return true;  // the sanitizer runs a thread of its own, which is safe to fork
#else
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return error || std::distance(begin(tasks), end(tasks)) == 1;
#endif
}

}  // namespace

void RankContext::fail(std::string text) {
  if (failures_.size() < kMaxFailuresPerRank) failures_.push_back(std::move(text));
}

bool RankContext::expect(bool held, std::string_view what) {
  if (!held) fail(std::string(what));
  return held;
}

bool RankContext::expect_ok(const Status& status, std::string_view what) {
  if (!status.ok()) fail(fmt::format("{}: {}", what, status.to_string()));
  return status.ok();
}

bool RankContext::expect_code(const Status& status, ErrorCode code, std::string_view what) {
  if (status.code() != code)
    fail(fmt::format("{}: expected {}, got {}", what, ferry::to_string(code), status.to_string()));
  return status.code() == code;
}

std::vector<std::string> collect_rank_failures(const RankRun& run, const RankBody& body) {
  const std::int64_t timeout_ns = std::chrono::nanoseconds(run.deadline).count();
  const auto rank_main = [&](int rank, Result<std::shared_ptr<Bootstrap>> bootstrap) {
    return run_rank(run, body, rank, std::move(bootstrap));
  };
  Result<std::vector<launch::RankEnd>> ends = std::vector<launch::RankEnd>();
  if (run.kind == RankKind::kThreads) {
    ends = launch::run_rank_threads(run.num_ranks, timeout_ns, rank_main);
  } else {
    if (!is_single_threaded()) return {"this process has several threads: it cannot fork ranks"};
    launch::RankProcesses processes;
    processes.num_ranks = run.num_ranks;
    processes.bootstrap_timeout_ns = timeout_ns;
    processes.run_timeout_ns = timeout_ns;
    ends = launch::run_rank_processes(processes, rank_main);
  }
  if (!ends.ok()) return {ends.status().to_string()};
  std::vector<std::string> failures;
  for (int rank = 0; rank < run.num_ranks; ++rank) {
    add_failures(rank, (*ends)[static_cast<std::size_t>(rank)], failures);
  }
  return failures;
}

void run_ranks(const RankRun& run, const RankBody& body) {
  for (const std::string& text : collect_rank_failures(run, body)) ADD_FAILURE() << text;
}

}  // namespace ferry::test
