#include "bench/bench_result.hpp"

#include <algorithm>

#include "common/timing.hpp"

namespace ferry::tools {

namespace {

constexpr double kMedian = 50.0;
constexpr double kTail = 99.0;

std::size_t series_offset(const BenchPlan& plan, Series which) {
  return sizeof(RankRows) +
         static_cast<std::size_t>(which) * static_cast<std::size_t>(plan.num_iterations) * sizeof(Interval);
}

/// One time per iteration.
std::vector<std::int64_t> iteration_times(const BenchPlan& plan, const RunOutcome& outcome, Series which) {
  std::vector<std::int64_t> times;
  for (std::size_t i = 0; i < static_cast<std::size_t>(plan.num_iterations); ++i) {
    Interval whole = BenchArea(plan, outcome.result(0)).series(which)[i];
    for (int rank = 1; rank < plan.num_ranks; ++rank) {
      const Interval interval = BenchArea(plan, outcome.result(rank)).series(which)[i];
      whole.start_ns = std::min(whole.start_ns, interval.start_ns);
      whole.end_ns = std::max(whole.end_ns, interval.end_ns);
    }
    times.push_back(whole.end_ns - whole.start_ns);
  }
  return times;
}

std::vector<std::int64_t> add(std::vector<std::int64_t> times, const std::vector<std::int64_t>& more) {
  std::transform(times.begin(), times.end(), more.begin(), times.begin(), std::plus<>());
  return times;
}

void set_times(OpResult* result, const std::vector<std::int64_t>& times) {
  result->time_p50_ns = percentile(times, kMedian);
  result->time_p99_ns = percentile(times, kTail);
}

std::optional<double> gbps(std::int64_t bytes, int num_ranks, std::int64_t ns) {
  if (bytes == 0 || ns == 0) return std::nullopt;
  return static_cast<double>(bytes) / num_ranks / static_cast<double>(ns);  // bytes per ns are GB/s
}

}  // namespace

std::size_t BenchArea::size_bytes(const BenchPlan& plan) {
  return series_offset(plan, static_cast<Series>(kNumSeries));
}

std::span<const Interval> BenchArea::series(Series which) const {
  return {reinterpret_cast<const Interval*>(bytes_.data() + series_offset(plan_, which)),
          static_cast<std::size_t>(plan_.num_iterations)};
}

std::span<Interval> MutableBenchArea::series(Series which) {
  return {reinterpret_cast<Interval*>(bytes_.data() + series_offset(plan_, which)),
          static_cast<std::size_t>(plan_.num_iterations)};
}

std::optional<double> OpResult::logical_gbps(int num_ranks) const {
  return gbps(logical_bytes, num_ranks, time_p50_ns);
}
std::optional<double> OpResult::wire_gbps(int num_ranks) const { return gbps(wire_bytes, num_ranks, time_p50_ns); }
std::optional<double> OpResult::limit_gbps(int num_ranks) const {
  return limit_p50_ns ? gbps(logical_bytes, num_ranks, *limit_p50_ns) : std::nullopt;
}
std::optional<double> OpResult::ratio_to_limit() const {
  if (!limit_p50_ns || time_p50_ns == 0 || logical_bytes == 0) return std::nullopt;
  return static_cast<double>(*limit_p50_ns) / static_cast<double>(time_p50_ns);
}

std::vector<OpResult> summarise(const BenchPlan& plan, const RunOutcome& outcome) {
  RankRows all{};
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const RankRows& rows = BenchArea(plan, outcome.result(rank)).rows();
    all.num_received += rows.num_received;
    all.num_received_remote += rows.num_received_remote;
  }
  std::vector<OpResult> results;
  if (plan.op == BenchOp::kRoute) {
    set_times(&results.emplace_back(), iteration_times(plan, outcome, Series::kRoute));
    return results;
  }
  const auto measure = [&](BenchOp op, Series series, Series limit, std::int64_t row_bytes) {
    OpResult& result = results.emplace_back();
    result.op = op;
    set_times(&result, iteration_times(plan, outcome, series));
    result.limit_p50_ns = percentile(iteration_times(plan, outcome, limit), kMedian);
    result.logical_bytes = all.num_received * row_bytes;
    result.wire_bytes = all.num_received_remote * row_bytes;
  };
  if (plan.measures_dispatch()) {
    measure(BenchOp::kDispatch, Series::kDispatch, Series::kDispatchLimit, plan.dispatch_row_bytes());
  }
  if (plan.measures_combine()) {
    measure(BenchOp::kCombine, Series::kCombine, Series::kCombineLimit, plan.combine_row_bytes());
  }
  if (plan.op == BenchOp::kPair) {
    OpResult pair;
    pair.op = BenchOp::kPair;
    pair.logical_bytes = results[0].logical_bytes + results[1].logical_bytes;
    pair.wire_bytes = results[0].wire_bytes + results[1].wire_bytes;
    set_times(&pair,
              add(iteration_times(plan, outcome, Series::kDispatch), iteration_times(plan, outcome, Series::kCombine)));
    pair.limit_p50_ns = percentile(add(iteration_times(plan, outcome, Series::kDispatchLimit),
                                       iteration_times(plan, outcome, Series::kCombineLimit)),
                                   kMedian);
    results.push_back(pair);
  }
  return results;
}

}  // namespace ferry::tools
