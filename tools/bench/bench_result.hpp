#ifndef FERRY_TOOLS_BENCH_BENCH_RESULT_HPP
#define FERRY_TOOLS_BENCH_BENCH_RESULT_HPP

/// What each rank hands back, and what follows from all of them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bench/bench_plan.hpp"
#include "common/launcher.hpp"

namespace ferry::tools {

/// Series of start and end times that a rank takes, one pair per iteration.
enum class Series { kRoute = 0, kDispatch, kDispatchLimit, kCombine, kCombineLimit };
inline constexpr std::size_t kNumSeries = 5;

struct Interval {
  std::int64_t start_ns;
  std::int64_t end_ns;
};

/// Rows of one rank. What goes out by dispatch comes back by combine.
struct RankRows {
  std::int64_t num_sent;  ///< own included
  std::int64_t num_sent_remote;
  std::int64_t num_received;  ///< own included
  std::int64_t num_received_remote;
};

/// A rank's result area: [ rows | series by iteration ].
class BenchArea {
 public:
  static std::size_t size_bytes(const BenchPlan& plan);
  BenchArea(const BenchPlan& plan, std::span<const std::byte> bytes) : plan_(plan), bytes_(bytes) {}
  const RankRows& rows() const { return *reinterpret_cast<const RankRows*>(bytes_.data()); }
  std::span<const Interval> series(Series which) const;

 private:
  const BenchPlan& plan_;
  std::span<const std::byte> bytes_;
};

/// The same, to be filled.
class MutableBenchArea {
 public:
  MutableBenchArea(const BenchPlan& plan, std::span<std::byte> bytes) : plan_(plan), bytes_(bytes) {}
  RankRows& rows() { return *reinterpret_cast<RankRows*>(bytes_.data()); }
  std::span<Interval> series(Series which);

 private:
  const BenchPlan& plan_;
  std::span<std::byte> bytes_;
};

/// One operation, over all ranks.
struct OpResult {
  BenchOp op = BenchOp::kRoute;
  std::int64_t time_p50_ns = 0;
  std::int64_t time_p99_ns = 0;
  std::int64_t logical_bytes = 0;  ///< rows received by all ranks, own ones included, times the bytes of a row
  std::int64_t wire_bytes = 0;     ///< the same without rows that stayed on their rank
  std::optional<std::int64_t> limit_p50_ns;  ///< plain memcpy of the same bytes; none for route

  /// Gigabytes per second and rank; none where there are no bytes.
  std::optional<double> logical_gbps(int num_ranks) const;
  std::optional<double> wire_gbps(int num_ranks) const;
  std::optional<double> limit_gbps(int num_ranks) const;
  std::optional<double> ratio_to_limit() const;
};

/// The operations of `plan`, a pair also as a whole. An iteration takes from the first rank's start to the last one's
/// end.
std::vector<OpResult> summarise(const BenchPlan& plan, const RunOutcome& outcome);

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_BENCH_RESULT_HPP
