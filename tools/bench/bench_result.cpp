#include "bench/bench_result.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/timing.hpp"

namespace ferry::tools {

namespace {

constexpr double kMedian = 50.0;
constexpr double kTail = 99.0;

constexpr std::size_t kWireOffset = sizeof(RankRows);
constexpr std::size_t kDeviceOffset = kWireOffset + sizeof(RankWire);
constexpr std::size_t kSeriesOffset = kDeviceOffset + sizeof(DeviceReport);
static_assert(kWireOffset % alignof(RankWire) == 0 && kDeviceOffset % alignof(DeviceReport) == 0 &&
              kSeriesOffset % alignof(Interval) == 0);

std::size_t series_offset(const BenchPlan& plan, Series which, std::size_t kernel_idx) {
  return kSeriesOffset + (kernel_idx * kNumSeries + static_cast<std::size_t>(which)) *
                             static_cast<std::size_t>(plan.num_iterations) * sizeof(Interval);
}

/// One time per iteration, that of its slowest rank: each rank's own duration counts, not when it started.
std::vector<std::int64_t> longest_of_ranks(const BenchPlan& plan, const RunOutcome& outcome, Series which,
                                           std::size_t kernel_idx) {
  std::vector<std::int64_t> times(static_cast<std::size_t>(plan.num_iterations), 0);
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const auto series = BenchArea(plan, outcome.result(rank)).series(which, kernel_idx);
    for (std::size_t i = 0; i < times.size(); ++i) {
      times[i] = std::max(times[i], series[i].end_ns - series[i].start_ns);
    }
  }
  return times;
}

/// One time per iteration, from the first rank's start to the last rank's end.
std::vector<std::int64_t> iteration_times(const BenchPlan& plan, const RunOutcome& outcome, Series which,
                                          std::size_t kernel_idx) {
  if (!plan.shares_clock) return longest_of_ranks(plan, outcome, which, kernel_idx);
  std::vector<std::int64_t> times;
  for (std::size_t i = 0; i < static_cast<std::size_t>(plan.num_iterations); ++i) {
    Interval whole = BenchArea(plan, outcome.result(0)).series(which, kernel_idx)[i];
    for (int rank = 1; rank < plan.num_ranks; ++rank) {
      const Interval interval = BenchArea(plan, outcome.result(rank)).series(which, kernel_idx)[i];
      whole.start_ns = std::min(whole.start_ns, interval.start_ns);
      whole.end_ns = std::max(whole.end_ns, interval.end_ns);
    }
    times.push_back(whole.end_ns - whole.start_ns);
  }
  return times;
}

/// The median over a rank's calls, of the rank where it is longest; nothing if they were not measured.
std::optional<std::int64_t> slowest_median(const BenchPlan& plan, const RunOutcome& outcome, Series which,
                                           std::size_t kernel_idx) {
  std::int64_t slowest = 0;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    std::vector<std::int64_t> times;
    for (const Interval& interval : BenchArea(plan, outcome.result(rank)).series(which, kernel_idx)) {
      times.push_back(interval.end_ns - interval.start_ns);
    }
    slowest = std::max(slowest, percentile(times, kMedian));
  }
  return slowest == 0 ? std::nullopt : std::optional(slowest);
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

/// Median over the repetitions of each raw exchange for `op`, a repetition lasting as long as its slowest rank.
std::vector<LimitResult> limits_of(const BenchPlan& plan, const RunOutcome& outcome, BenchOp op) {
  std::vector<LimitResult> limits;
  const DeviceReport& first = BenchArea(plan, outcome.result(0)).device();
  for (std::size_t run_idx = 0; run_idx < first.num_limit_runs; ++run_idx) {
    const LimitRun& run = first.limit_runs[run_idx];
    if (run.op != op) continue;
    std::vector<std::int64_t> times(run.time_ns.begin(), run.time_ns.end());
    for (int rank = 1; rank < plan.num_ranks; ++rank) {
      const LimitRun& theirs = BenchArea(plan, outcome.result(rank)).device().limit_runs[run_idx];
      std::transform(times.begin(), times.end(), theirs.time_ns.begin(), times.begin(),
                     [](std::int64_t a, std::int64_t b) { return std::max(a, b); });
    }
    LimitResult& limit = limits.emplace_back();
    limit.method = run.method;
    limit.num_sms = run.num_sms;
    limit.time_p50_ns = percentile(times, kMedian);
    limit.gbps = gbps(run.num_bytes, 1, limit.time_p50_ns).value_or(0.0);
  }
  return limits;
}

/// One call, over all ranks; nothing with one node.
std::optional<WireTotal> wire_of(const BenchPlan& plan, const RunOutcome& outcome, WireFigures RankWire::*which) {
  if (plan.num_nodes == 1) return std::nullopt;
  WireTotal total;
  total.num_ranks = plan.num_ranks;
  for (int rank = 0; rank < plan.num_ranks; ++rank) total.add(BenchArea(plan, outcome.result(rank)).wire().*which);
  return total;
}

/// The fastest raw exchange gives the shortest time in which the bytes of this operation can be sent.
void set_gpu_limit(const BenchPlan& plan, const RunOutcome& outcome, OpResult* result) {
  result->limits = limits_of(plan, outcome, result->op);
  result->limit_is_wire = !BenchArea(plan, outcome.result(0)).device().limit_is_local;
  const auto best = std::max_element(result->limits.begin(), result->limits.end(),
                                     [](const LimitResult& a, const LimitResult& b) { return a.gbps < b.gbps; });
  if (best == result->limits.end() || best->gbps <= 0.0) return;
  const std::int64_t bytes = result->limit_is_wire ? result->wire_bytes : result->logical_bytes;
  if (bytes > 0) result->limit_p50_ns = std::llround(static_cast<double>(bytes) / plan.num_ranks / best->gbps);
  if (result->limit_is_wire && bytes > 0) {
    result->busiest_limit_p50_ns = std::llround(static_cast<double>(result->busiest_rank_bytes) / best->gbps);
  }
}

}  // namespace

std::size_t BenchArea::size_bytes(const BenchPlan& plan) { return series_offset(plan, Series{}, plan.kernels.size()); }

const RankWire& BenchArea::wire() const { return *reinterpret_cast<const RankWire*>(bytes_.data() + kWireOffset); }

const DeviceReport& BenchArea::device() const {
  return *reinterpret_cast<const DeviceReport*>(bytes_.data() + kDeviceOffset);
}

std::span<const Interval> BenchArea::series(Series which, std::size_t kernel_idx) const {
  return {reinterpret_cast<const Interval*>(bytes_.data() + series_offset(plan_, which, kernel_idx)),
          static_cast<std::size_t>(plan_.num_iterations)};
}

RankWire& MutableBenchArea::wire() { return *reinterpret_cast<RankWire*>(bytes_.data() + kWireOffset); }

DeviceReport& MutableBenchArea::device() { return *reinterpret_cast<DeviceReport*>(bytes_.data() + kDeviceOffset); }

std::span<Interval> MutableBenchArea::series(Series which, std::size_t kernel_idx) {
  return {reinterpret_cast<Interval*>(bytes_.data() + series_offset(plan_, which, kernel_idx)),
          static_cast<std::size_t>(plan_.num_iterations)};
}

std::optional<double> OpResult::logical_gbps(int num_ranks) const {
  return gbps(logical_bytes, num_ranks, time_p50_ns);
}
std::optional<double> OpResult::wire_gbps(int num_ranks) const { return gbps(wire_bytes, num_ranks, time_p50_ns); }
std::optional<double> OpResult::network_gbps(int num_ranks) const {
  return wire ? gbps(wire->sent_bytes, num_ranks, time_p50_ns) : std::nullopt;
}
std::optional<double> OpResult::limit_gbps(int num_ranks) const {
  return limit_p50_ns ? gbps(limit_is_wire ? wire_bytes : logical_bytes, num_ranks, *limit_p50_ns) : std::nullopt;
}
std::optional<double> OpResult::ratio_to_limit() const {
  if (!limit_p50_ns || time_p50_ns == 0 || logical_bytes == 0) return std::nullopt;
  return static_cast<double>(*limit_p50_ns) / static_cast<double>(time_p50_ns);
}

std::optional<double> OpResult::ratio_to_busiest_limit() const {
  if (!busiest_limit_p50_ns || time_p50_ns == 0) return std::nullopt;
  return static_cast<double>(*busiest_limit_p50_ns) / static_cast<double>(time_p50_ns);
}

std::vector<OpResult> summarise(const BenchPlan& plan, const RunOutcome& outcome, std::size_t kernel_idx) {
  RankRows all{};
  std::int64_t busiest_rows = 0;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const RankRows& rows = BenchArea(plan, outcome.result(rank)).rows();
    all.num_received += rows.num_received;
    all.num_received_remote += rows.num_received_remote;
    busiest_rows = std::max({busiest_rows, rows.num_sent_remote, rows.num_received_remote});
  }
  std::vector<OpResult> results;
  const auto times = [&](Series series) { return iteration_times(plan, outcome, series, kernel_idx); };
  if (plan.op == BenchOp::kRoute) {
    OpResult& result = results.emplace_back();
    set_times(&result, times(Series::kRoute));
    result.wire = wire_of(plan, outcome, &RankWire::route);
    if (plan.on_gpu()) result.events_p50_ns = percentile(times(Series::kRouteEvents), kMedian);
    return results;
  }
  const auto measure = [&](BenchOp op, Series series, Series limit, Series host, Series in_row,
                           std::int64_t row_bytes) {
    OpResult& result = results.emplace_back();
    result.op = op;
    set_times(&result, times(series));
    result.logical_bytes = all.num_received * row_bytes;
    result.wire_bytes = all.num_received_remote * row_bytes;
    result.busiest_rank_bytes = busiest_rows * row_bytes;
    if (plan.on_gpu()) {
      result.host_p50_ns = percentile(longest_of_ranks(plan, outcome, host, kernel_idx), kMedian);
      result.in_row_p50_ns = slowest_median(plan, outcome, in_row, kernel_idx);
      set_gpu_limit(plan, outcome, &result);
    } else if (plan.has_limit()) {
      result.limit_p50_ns = percentile(times(limit), kMedian);
    }
  };
  if (plan.measures_dispatch()) {
    measure(BenchOp::kDispatch, Series::kDispatch, Series::kDispatchLimit, Series::kDispatchHost,
            Series::kDispatchInRow, plan.dispatch_row_bytes());
    results.back().wire = wire_of(plan, outcome, &RankWire::dispatch);
  }
  if (plan.measures_combine()) {
    measure(BenchOp::kCombine, Series::kCombine, Series::kCombineLimit, Series::kCombineHost, Series::kCombineInRow,
            plan.combine_row_bytes());
    results.back().wire = wire_of(plan, outcome, &RankWire::combine);
  }
  if (plan.op == BenchOp::kPair) {
    OpResult pair;
    pair.op = BenchOp::kPair;
    pair.logical_bytes = results[0].logical_bytes + results[1].logical_bytes;
    pair.wire_bytes = results[0].wire_bytes + results[1].wire_bytes;
    pair.busiest_rank_bytes = results[0].busiest_rank_bytes + results[1].busiest_rank_bytes;
    set_times(&pair, add(times(Series::kDispatch), times(Series::kCombine)));
    if (plan.num_nodes > 1) pair.wire = *results[0].wire + *results[1].wire;
    if (!plan.on_gpu() && plan.has_limit()) {
      pair.limit_p50_ns = percentile(add(times(Series::kDispatchLimit), times(Series::kCombineLimit)), kMedian);
    } else if (plan.on_gpu()) {
      pair.limit_is_wire = results[0].limit_is_wire;
      pair.host_p50_ns = *results[0].host_p50_ns + *results[1].host_p50_ns;
      if (results[0].in_row_p50_ns && results[1].in_row_p50_ns) {
        pair.in_row_p50_ns = *results[0].in_row_p50_ns + *results[1].in_row_p50_ns;
      }
      if (results[0].limit_p50_ns && results[1].limit_p50_ns) {
        pair.limit_p50_ns = *results[0].limit_p50_ns + *results[1].limit_p50_ns;
      }
      if (results[0].busiest_limit_p50_ns && results[1].busiest_limit_p50_ns) {
        pair.busiest_limit_p50_ns = *results[0].busiest_limit_p50_ns + *results[1].busiest_limit_p50_ns;
      }
    }
    results.push_back(pair);
  }
  return results;
}

}  // namespace ferry::tools
