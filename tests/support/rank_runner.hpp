#ifndef FERRY_TESTS_RANK_RUNNER_HPP
#define FERRY_TESTS_RANK_RUNNER_HPP

/// Runs one function on every rank of a group, with ranks as threads of this process or as forked processes, and turns
/// their failures into failures of the running test. A rank that hangs or dies is reported by its number; the test
/// never hangs.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/status.hpp"

namespace ferry::test {

enum class RankKind { kThreads, kProcesses };

/// Context of a rank's function. Report failures through it: a GoogleTest failure in a forked process reaches the
/// parent without its text.
class RankContext {
 public:
  RankContext(int rank, int num_ranks, std::shared_ptr<Bootstrap> bootstrap)
      : rank_(rank), num_ranks_(num_ranks), bootstrap_(std::move(bootstrap)) {}

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  /// Bootstrap to create groups with; they use it only during creation.
  std::shared_ptr<Bootstrap> bootstrap() const { return bootstrap_; }

  void fail(std::string text);
  /// Each returns true if the expectation holds.
  bool expect(bool held, std::string_view what);
  bool expect_ok(const Status& status, std::string_view what);
  bool expect_code(const Status& status, ErrorCode code, std::string_view what);

  const std::vector<std::string>& failures() const { return failures_; }

 private:
  int rank_;
  int num_ranks_;
  std::shared_ptr<Bootstrap> bootstrap_;
  std::vector<std::string> failures_;
};

using RankBody = std::function<void(RankContext&)>;

struct RankRun {
  RankKind kind = RankKind::kThreads;
  int num_ranks = 1;
  /// For the whole run. Processes still running at the deadline are killed; threads cannot be, so the test program is
  /// aborted.
  std::chrono::seconds deadline{120};
};

/// Returns the failures of all ranks, each naming its rank. Processes need a single-threaded caller (fork copies only
/// one thread).
std::vector<std::string> collect_rank_failures(const RankRun& run, const RankBody& body);

/// Same, with each failure added to the running test.
void run_ranks(const RankRun& run, const RankBody& body);

}  // namespace ferry::test

#endif  // FERRY_TESTS_RANK_RUNNER_HPP
