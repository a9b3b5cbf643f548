#include "bench/gpu_timing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "bench/bench_result.hpp"
#include "bench/gpu_timer.hpp"
#include "bench/launch_recorder.hpp"
#include "bench/raw_limit.hpp"
#include "device/device_graph.hpp"

namespace ferry::tools {

namespace {

/// A call, and the series for its times.
struct Measured {
  BenchOp op;
  GpuTimer::Call call;
  Series events;
  Series host;
  std::optional<Series> in_row;
  std::optional<Series> send = std::nullopt;  ///< split call: time until its send half is done on the stream
};

/// No call of latency mode waits on the host; neither does a route into a slab.
std::vector<Measured> measured_by_latency(const BenchPlan& plan, Operations& operations) {
  const auto finish = [&] { return operations.wait(); };
  std::vector<Measured> all;
  if (plan.measures_dispatch()) {
    all.push_back({BenchOp::kLatencyDispatch,
                   {[&] { return operations.latency_dispatch(); }, finish},
                   Series::kDispatch,
                   Series::kDispatchHost,
                   Series::kDispatchInRow,
                   plan.split ? std::optional(Series::kDispatchSend) : std::nullopt});
  }
  if (plan.measures_combine()) {
    all.push_back({BenchOp::kLatencyCombine,
                   {[&] { return operations.latency_combine(); }, finish},
                   Series::kCombine,
                   Series::kCombineHost,
                   Series::kCombineInRow,
                   plan.split ? std::optional(Series::kCombineSend) : std::nullopt});
  }
  if (!plan.compares) return all;
  if (plan.op == BenchOp::kLatencyPair) {
    all.push_back({BenchOp::kLatencyPair,
                   {[&] { return operations.latency_pair(); }, finish},
                   Series::kPair,
                   Series::kPairHost,
                   Series::kPairInRow});
  }
  all.push_back({plan.reference_op(),
                 {[&] { return operations.reference(); }, finish},
                 Series::kReference,
                 Series::kReferenceHost,
                 {}});
  return all;
}

std::vector<Measured> measured_by(const BenchPlan& plan, Operations& operations) {
  const auto finish = [&] { return operations.wait(); };
  if (plan.latency()) return measured_by_latency(plan, operations);
  std::vector<Measured> all;
  if (plan.op == BenchOp::kRoute) {
    all.push_back({BenchOp::kRoute,
                   {[&] { return operations.route(); }, finish, true},
                   Series::kRouteEvents,
                   Series::kRoute,
                   {}});
  }
  if (plan.measures_dispatch()) {
    const bool waits_for_counts = !plan.cached && plan.layout != Layout::kSlab;
    all.push_back({BenchOp::kDispatch,
                   {[&] { return operations.dispatch(); }, finish, waits_for_counts},
                   Series::kDispatch,
                   Series::kDispatchHost,
                   plan.cached ? std::optional(Series::kDispatchInRow) : std::nullopt});
  }
  if (plan.measures_combine()) {
    all.push_back({BenchOp::kCombine,
                   {[&] { return operations.combine(); }, finish},
                   Series::kCombine,
                   Series::kCombineHost,
                   Series::kCombineInRow});
  }
  return all;
}

/// Pairs in one graph: many, so that its launch does not count.
constexpr std::int64_t kGraphPairs = 100;
/// Time limit of a graph, beyond which it has fewer pairs, for example if rank processes take turns on a GPU.
constexpr std::int64_t kMaxGraphNs = 200'000'000;
/// Trial pairs, of which the fastest decides the number of pairs.
constexpr int kNumTrials = 3;

/// Times a pair in a graph of many.
Status time_pairs_in_graph(const BenchPlan& plan, Operations& operations, RankContext& context, const GpuTimer& timer,
                           std::span<Interval> times) {
  std::int64_t least_ns = kMaxGraphNs;
  for (int trial = 0; trial < kNumTrials; ++trial) {
    const auto once = timer.time({[&] { return operations.latency_pair(); }, [&] { return operations.wait(); }});
    if (!once) return once.status();
    least_ns = std::min(least_ns, once->events_ns);
  }
  const auto pair_ns = context.largest(std::max<std::int64_t>(least_ns, 1));
  if (!pair_ns) return pair_ns.status();
  const auto num_pairs = std::clamp<std::int64_t>(kMaxGraphNs / *pair_ns, 1, kGraphPairs);
  const Stream stream = operations.device().stream();
  auto graph =
      DeviceGraph::capture(stream, [&] { return operations.latency_pairs_to_capture(static_cast<int>(num_pairs)); });
  if (!graph) return graph.status();
  const GpuTimer::Call call{[&] { return graph->launch(stream); }, [&] { return operations.wait(); }};
  for (int round = 0; round < plan.num_warmup + plan.num_iterations; ++round) {
    auto elapsed = timer.time(call);
    if (!elapsed) return elapsed.status();
    if (round >= plan.num_warmup)
      times[static_cast<std::size_t>(round - plan.num_warmup)] = {0, elapsed->events_ns / num_pairs};
  }
  return {};
}

/// Makes one more, untimed call of each kind.
Status record_launches(const BenchPlan& plan, Operations& operations, DeviceReport* report) {
  for (const Measured& measured : measured_by(plan, operations)) {
    CallLaunches& record = report->calls.at(report->num_calls++);
    record.op = measured.op;
    {
      const LaunchRecorder recorder(&record);
      if (Status status = measured.call.enqueue(); !status) return status;
    }
    if (Status status = measured.call.finish(); !status) return status;
  }
  return {};
}

Status time_rounds(const BenchPlan& plan, std::size_t kernel_idx, Operations& operations, const GpuTimer& timer,
                   MutableBenchArea* area) {
  for (int round = 0; round < plan.num_warmup + plan.num_iterations; ++round) {
    for (const Measured& measured : measured_by(plan, operations)) {
      GpuTimer::Call call = measured.call;
      call.late_ns = operations.late_ns();
      call.has_halves = measured.send.has_value();
      operations.on_sent(call.has_halves ? [&timer] { return timer.mark_sent(); } : std::function<Status()>());
      auto times = timer.time(call);
      operations.on_sent({});
      if (!times) return times.status();
      if (round < plan.num_warmup) continue;
      const auto iteration = static_cast<std::size_t>(round - plan.num_warmup);
      area->series(measured.events, kernel_idx)[iteration] = {0, times->events_ns};
      area->series(measured.host, kernel_idx)[iteration] = times->host;
      if (measured.send) area->series(*measured.send, kernel_idx)[iteration] = {0, times->sent_ns};
    }
  }
  return {};
}

Status time_kernel(const BenchPlan& plan, std::size_t kernel_idx, Operations& operations, RankContext& context,
                   const GpuTimer& timer, MutableBenchArea* area) {
  operations.use(plan.kernels[kernel_idx]);
  if (Status status = operations.check(); !status) return status;
  if (plan.kernels.size() == 1) {
    if (Status status = record_launches(plan, operations, &area->device()); !status) return status;
  }
  if (Status status = time_rounds(plan, kernel_idx, operations, timer, area); !status) return status;
  for (const Measured& measured : measured_by(plan, operations)) {
    if (!measured.in_row || plan.kernels.size() > 1) continue;
    if (Status status = timer.time_in_row(measured.call, area->series(*measured.in_row, kernel_idx)); !status) {
      return status;
    }
  }
  if (plan.op != BenchOp::kLatencyPair || plan.kernels.size() > 1) return {};
  return time_pairs_in_graph(plan, operations, context, timer, area->series(Series::kPairInGraph, kernel_idx));
}

Status time_limits(const BenchPlan& plan, const Operations& operations, RankContext& context, const GpuTimer& timer,
                   DeviceReport* report) {
  const RankRows rows = operations.rows();
  const std::int64_t num_fewest =
      plan.latency() ? count_crossing_rows(plan)[static_cast<std::size_t>(context.rank())].num_sent : 0;
  const auto measure = [&](BenchOp op, std::int64_t row_bytes) {
    // Number of rows that must cross: see summarise.
    const bool all_cross = !plan.latency() || (op == BenchOp::kLatencyCombine && plan.order == CombineOrder::kExact);
    const RawLimitInput input{op,
                              row_bytes,
                              rows.num_sent,
                              all_cross ? rows.num_sent_remote : num_fewest,
                              plan.kernels.front().num_sms,
                              plan.latency()};
    return measure_raw_limit(input, context, operations.device(), timer, report);
  };
  if (plan.measures_dispatch()) {
    if (Status status = measure(plan.dispatch_op(), plan.dispatch_row_bytes()); !status) return status;
  }
  return plan.measures_combine() ? measure(plan.combine_op(), plan.combine_sent_row_bytes()) : Status();
}

/// True if the settings do not suit this GPU or memory; every rank gets the same result, and the group remains usable.
bool is_refusal(const Status& status) {
  return status.code() == ErrorCode::kInvalidArgument || status.code() == ErrorCode::kUnsupported;
}

}  // namespace

Status time_on_gpu(const BenchPlan& plan, Operations& operations, RankContext& context, Progress* progress) {
  MutableBenchArea area(plan, context.result());
  auto facts = read_device_facts(operations.device().ordinal());
  if (!facts) return facts.status();
  area.device().facts = *facts;
  GpuTimer timer;
  if (Status status = timer.set_up(context, operations.device()); !status) return status;
  // Meet as before the first call: allocations may have waited for the GPU.
  if (Status status = context.barrier(); !status) return status;
  for (std::size_t kernel_idx = 0; kernel_idx < plan.kernels.size(); ++kernel_idx) {
    // Settings that exceed this GPU get no times and so do not appear in the tables.
    if (plan.kernels.size() > 1 && plan.kernels[kernel_idx].num_sms > facts->num_sms) continue;
    progress->step(plan.kernels.size() == 1 ? fmt::format("T = {}: measure", plan.num_tokens)
                                            : fmt::format("{} {}: settings {} of {}", name_of(plan.dtype),
                                                          name_of(plan.memory), kernel_idx + 1, plan.kernels.size()));
    Status status = time_kernel(plan, kernel_idx, operations, context, timer, &area);
    if (plan.kernels.size() > 1 && is_refusal(status)) continue;
    if (!status) return status;
  }
  area.wire() = operations.wire();
  if (!plan.has_limit() || plan.op == BenchOp::kRoute) return {};
  progress->step(fmt::format("T = {}: raw exchanges, the limit", plan.num_tokens));
  return time_limits(plan, operations, context, timer, &area.device());
}

}  // namespace ferry::tools
