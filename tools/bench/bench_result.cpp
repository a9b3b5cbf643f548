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

/// One time per iteration, that of its slowest rank: only durations count, not start times.
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

/// Median over the calls of the slowest rank; absent if the calls were not measured.
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

/// Median over the repetitions of each raw exchange for `op`; the slowest rank determines a repetition's time.
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

/// Kernels of one call of `op` on rank 0.
std::vector<KernelLaunch> kernels_of(const BenchPlan& plan, const RunOutcome& outcome, BenchOp op) {
  const DeviceReport& first = BenchArea(plan, outcome.result(0)).device();
  for (std::size_t call_idx = 0; call_idx < first.num_calls; ++call_idx) {
    const CallLaunches& call = first.calls[call_idx];
    if (call.op != op) continue;
    const auto num_kept = std::min<std::size_t>(call.num_launches, call.launches.size());
    return {call.launches.begin(), call.launches.begin() + static_cast<std::ptrdiff_t>(num_kept)};
  }
  return {};
}

/// Network traffic of one call, over all ranks; absent on one node.
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
  std::int64_t flag_ns = 0;  // in latency mode a call must also notify each rank of the arrival of the others' rows
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    flag_ns = std::max(flag_ns, BenchArea(plan, outcome.result(rank)).device().flag_round_trip_ns);
  }
  const std::int64_t bytes = result->limit_is_wire ? result->wire_bytes : result->logical_bytes;
  if (bytes > 0)
    result->limit_p50_ns = flag_ns + std::llround(static_cast<double>(bytes) / plan.num_ranks / best->gbps);
  if (result->limit_is_wire && bytes > 0) {
    result->busiest_limit_p50_ns = flag_ns + std::llround(static_cast<double>(result->busiest_rank_bytes) / best->gbps);
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
std::optional<std::int64_t> OpResult::wire_limit_ns(double network_gbps) const {
  if (!wire || network_gbps <= 0 || wire->max_rank_bytes == 0) return std::nullopt;
  return std::llround(static_cast<double>(wire->max_rank_bytes) / network_gbps);
}
std::optional<double> OpResult::ratio_to_wire(double network_gbps) const {
  const std::optional<std::int64_t> limit_ns = wire_limit_ns(network_gbps);
  if (!limit_ns || time_p50_ns == 0) return std::nullopt;
  return static_cast<double>(*limit_ns) / static_cast<double>(time_p50_ns);
}
std::optional<double> OpResult::limit_gbps(int num_ranks) const {
  return limit_p50_ns ? gbps(limit_is_wire ? wire_bytes : logical_bytes, num_ranks, *limit_p50_ns) : std::nullopt;
}
std::optional<double> OpResult::ratio_to_limit() const {
  if (!limit_p50_ns || time_p50_ns == 0 || logical_bytes == 0) return std::nullopt;
  return static_cast<double>(*limit_p50_ns) / static_cast<double>(time_p50_ns);
}

std::optional<int> OpResult::num_sms() const {
  const auto largest = std::max_element(kernels.begin(), kernels.end(),
                                        [](const auto& a, const auto& b) { return a.num_blocks < b.num_blocks; });
  return largest == kernels.end() ? std::nullopt : std::optional(largest->num_blocks);
}

std::optional<std::int64_t> OpResult::held_sm_ns() const {
  const std::optional<int> most = num_sms();
  if (!most) return std::nullopt;
  constexpr std::size_t kHalves = 2;
  if (!send_p50_ns || kernels.size() != kHalves) return *most * time_p50_ns;
  const std::int64_t send_ns = std::min(*send_p50_ns, time_p50_ns);
  return kernels[0].num_blocks * send_ns + kernels[1].num_blocks * (time_p50_ns - send_ns);
}

std::optional<double> OpResult::ratio_to_reference() const {
  if (!reference_p50_ns || *reference_p50_ns == 0) return std::nullopt;
  return static_cast<double>(time_p50_ns) / static_cast<double>(*reference_p50_ns);
}

std::optional<double> OpResult::ratio_to_busiest_limit() const {
  if (!busiest_limit_p50_ns || time_p50_ns == 0) return std::nullopt;
  return static_cast<double>(*busiest_limit_p50_ns) / static_cast<double>(time_p50_ns);
}

namespace {

/// Rows that the ranks moved in one call.
struct MovedRows {
  std::int64_t logical = 0;
  std::int64_t remote = 0;
  std::int64_t busiest = 0;  ///< sent to or received from other ranks, whichever is more, by the busiest rank
};

MovedRows rows_of_results(const BenchPlan& plan, const RunOutcome& outcome) {
  MovedRows moved;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const RankRows& rows = BenchArea(plan, outcome.result(rank)).rows();
    moved.logical += rows.num_received;
    moved.remote += rows.num_received_remote;
    moved.busiest = std::max({moved.busiest, rows.num_sent_remote, rows.num_received_remote});
  }
  return moved;
}

/// Fewest rows that must cross between ranks: each token once to each rank, and as many sums back if ranks sum.
MovedRows fewest_rows(const BenchPlan& plan, const MovedRows& moved) {
  MovedRows fewest;
  fewest.logical = moved.logical;
  for (const CrossingRows& rows : count_crossing_rows(plan)) {
    fewest.remote += rows.num_sent;
    fewest.busiest = std::max({fewest.busiest, rows.num_sent, rows.num_received});
  }
  return fewest;
}

/// Computes the results of one measurement.
class Summary {
 public:
  Summary(const BenchPlan& plan, const RunOutcome& outcome, std::size_t kernel_idx)
      : plan_(plan), outcome_(outcome), kernel_idx_(kernel_idx) {}

  std::vector<std::int64_t> times(Series series) const { return iteration_times(plan_, outcome_, series, kernel_idx_); }
  std::int64_t host_p50(Series series) const {
    return percentile(longest_of_ranks(plan_, outcome_, series, kernel_idx_), kMedian);
  }
  std::optional<std::int64_t> in_row_p50(Series series) const {
    return slowest_median(plan_, outcome_, series, kernel_idx_);
  }

  OpResult route() const {
    OpResult result;
    set_times(&result, times(Series::kRoute));
    result.wire = wire_of(plan_, outcome_, &RankWire::route);
    if (plan_.on_gpu()) result.events_p50_ns = percentile(times(Series::kRouteEvents), kMedian);
    result.kernels = kernels_of(plan_, outcome_, BenchOp::kRoute);
    return result;
  }

  OpResult dispatch(const MovedRows& moved) const {
    OpResult result = operation(plan_.dispatch_op(), moved, plan_.dispatch_row_bytes(),
                                {Series::kDispatch, Series::kDispatchLimit, Series::kDispatchHost,
                                 Series::kDispatchInRow, Series::kDispatchSend});
    result.wire = wire_of(plan_, outcome_, &RankWire::dispatch);
    return result;
  }

  OpResult combine(const MovedRows& moved) const {
    OpResult result = operation(
        plan_.combine_op(), moved, plan_.combine_sent_row_bytes(),
        {Series::kCombine, Series::kCombineLimit, Series::kCombineHost, Series::kCombineInRow, Series::kCombineSend});
    result.wire = wire_of(plan_, outcome_, &RankWire::combine);
    return result;
  }

  OpResult pair(const OpResult& dispatch, const OpResult& combine) const;
  OpResult reference(const MovedRows& moved) const;

 private:
  struct Names {
    Series time;
    Series limit;
    Series host;
    Series in_row;
    Series send;
  };
  OpResult operation(BenchOp op, const MovedRows& moved, std::int64_t row_bytes, const Names& series) const;

  const BenchPlan& plan_;
  const RunOutcome& outcome_;
  std::size_t kernel_idx_;
};

OpResult Summary::operation(BenchOp op, const MovedRows& moved, std::int64_t row_bytes, const Names& series) const {
  OpResult result;
  result.op = op;
  set_times(&result, times(series.time));
  result.logical_bytes = moved.logical * row_bytes;
  result.wire_bytes = moved.remote * row_bytes;
  result.busiest_rank_bytes = moved.busiest * row_bytes;
  result.kernels = kernels_of(plan_, outcome_, op);
  if (plan_.on_gpu()) {
    result.host_p50_ns = host_p50(series.host);
    result.in_row_p50_ns = in_row_p50(series.in_row);
    set_gpu_limit(plan_, outcome_, &result);
  } else if (plan_.has_limit()) {
    result.limit_p50_ns = percentile(times(series.limit), kMedian);
  }
  if (plan_.split) result.send_p50_ns = host_p50(series.send);
  return result;
}

/// Sum of both; in latency mode one call right after the other, with the limits of both.
OpResult Summary::pair(const OpResult& dispatch, const OpResult& combine) const {
  OpResult pair;
  pair.op = plan_.op;
  pair.logical_bytes = dispatch.logical_bytes + combine.logical_bytes;
  pair.wire_bytes = dispatch.wire_bytes + combine.wire_bytes;
  pair.busiest_rank_bytes = dispatch.busiest_rank_bytes + combine.busiest_rank_bytes;
  const bool latency = plan_.latency();
  pair.kernels = dispatch.kernels;
  pair.kernels.insert(pair.kernels.end(), combine.kernels.begin(), combine.kernels.end());
  set_times(&pair, latency ? times(Series::kPair) : add(times(Series::kDispatch), times(Series::kCombine)));
  if (plan_.num_nodes > 1) pair.wire = *dispatch.wire + *combine.wire;
  if (!plan_.on_gpu() && plan_.has_limit()) {
    pair.limit_p50_ns = percentile(add(times(Series::kDispatchLimit), times(Series::kCombineLimit)), kMedian);
  } else if (plan_.on_gpu()) {
    pair.limit_is_wire = dispatch.limit_is_wire;
    pair.host_p50_ns = latency ? host_p50(Series::kPairHost) : *dispatch.host_p50_ns + *combine.host_p50_ns;
    if (latency) {
      pair.in_row_p50_ns = in_row_p50(Series::kPairInRow);
      const auto in_graph = longest_of_ranks(plan_, outcome_, Series::kPairInGraph, kernel_idx_);
      pair.graph_p50_ns = percentile(in_graph, kMedian);
      pair.graph_p99_ns = percentile(in_graph, kTail);
    } else if (dispatch.in_row_p50_ns && combine.in_row_p50_ns) {
      pair.in_row_p50_ns = *dispatch.in_row_p50_ns + *combine.in_row_p50_ns;
    }
    if (dispatch.limit_p50_ns && combine.limit_p50_ns) {
      pair.limit_p50_ns = *dispatch.limit_p50_ns + *combine.limit_p50_ns;
    }
    if (dispatch.busiest_limit_p50_ns && combine.busiest_limit_p50_ns) {
      pair.busiest_limit_p50_ns = *dispatch.busiest_limit_p50_ns + *combine.busiest_limit_p50_ns;
    }
  }
  return pair;
}

/// Each row crosses separately. Limits are those of the calls of latency mode.
OpResult Summary::reference(const MovedRows& moved) const {
  OpResult reference;
  reference.op = plan_.reference_op();
  const std::int64_t row_bytes = (plan_.measures_dispatch() ? plan_.dispatch_row_bytes() : 0) +
                                 (plan_.measures_combine() ? plan_.combine_row_bytes() : 0);
  reference.logical_bytes = moved.logical * row_bytes;
  reference.wire_bytes = moved.remote * row_bytes;
  reference.busiest_rank_bytes = moved.busiest * row_bytes;
  reference.kernels = kernels_of(plan_, outcome_, reference.op);
  set_times(&reference, times(Series::kReference));
  if (plan_.on_gpu()) reference.host_p50_ns = host_p50(Series::kReferenceHost);
  return reference;
}

}  // namespace

std::vector<OpResult> summarise(const BenchPlan& plan, const RunOutcome& outcome, std::size_t kernel_idx) {
  const Summary summary(plan, outcome, kernel_idx);
  if (plan.op == BenchOp::kRoute) return {summary.route()};
  const MovedRows moved = rows_of_results(plan, outcome);
  const MovedRows fewest = plan.latency() ? fewest_rows(plan, moved) : moved;
  std::vector<OpResult> results;
  if (plan.measures_dispatch()) results.push_back(summary.dispatch(fewest));
  if (plan.measures_combine()) {
    // Rows that are added one by one must return one by one.
    results.push_back(summary.combine(plan.order == CombineOrder::kRankSums ? fewest : moved));
  }
  if (plan.is_pair()) results.push_back(summary.pair(results[0], results[1]));
  if (plan.latency()) {
    const OpResult reference = summary.reference(moved);
    results.back().reference_p50_ns = reference.time_p50_ns;
    results.push_back(reference);
  }
  return results;
}

}  // namespace ferry::tools
