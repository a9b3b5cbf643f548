#include "bench/bench_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "bench/bench_result.hpp"
#include "bench/copy_limit.hpp"
#include "bench/gpu_timing.hpp"
#include "bench/operations.hpp"
#include "common/timing.hpp"
#include "report/progress.hpp"

namespace ferry::tools {

namespace {

/// A call that is timed in every iteration.
struct Measured {
  Series series;
  std::function<Status()> run;
  std::optional<Series> send = std::nullopt;  ///< until the send half returned
};

/// The operation and its limit, in turn, so that changes in the machine's speed affect both.
std::vector<Measured> measured_by(const BenchPlan& plan, Operations& operations) {
  std::vector<Measured> all;
  const bool latency = plan.latency();
  if (plan.op == BenchOp::kRoute) all.push_back({Series::kRoute, [&] { return operations.route(); }});
  if (plan.measures_dispatch()) {
    if (plan.has_limit()) {
      all.push_back({Series::kDispatchLimit, [&] {
                       copy_as_dispatch(plan, operations.buffers(), operations.rows_per_token());
                       return Status();
                     }});
    }
    all.push_back(
        latency ? Measured{Series::kDispatch, [&] { return operations.latency_dispatch(); }, Series::kDispatchSend}
                : Measured{Series::kDispatch, [&] { return operations.dispatch(); }});
  }
  if (plan.measures_combine()) {
    if (plan.has_limit()) {
      all.push_back({Series::kCombineLimit, [&] {
                       copy_as_combine(plan, operations.buffers(), operations.rows().num_sent);
                       return Status();
                     }});
    }
    all.push_back(latency
                      ? Measured{Series::kCombine, [&] { return operations.latency_combine(); }, Series::kCombineSend}
                      : Measured{Series::kCombine, [&] { return operations.combine(); }});
  }
  if (plan.op == BenchOp::kLatencyPair) all.push_back({Series::kPair, [&] { return operations.latency_pair(); }});
  if (latency) all.push_back({Series::kReference, [&] { return operations.reference(); }});
  return all;
}

Status time_on_host(const BenchPlan& plan, Operations& operations, RankContext& context, Progress* progress) {
  MutableBenchArea area(plan, context.result());
  const auto all = measured_by(plan, operations);
  const int num_rounds = plan.num_warmup + plan.num_iterations;
  // At most four lines if progress is printed line by line.
  const int rounds_per_step = std::max(1, (num_rounds + 3) / 4);
  for (int round = 0; round < num_rounds; ++round) {
    const int iteration = round - plan.num_warmup;
    if (round % rounds_per_step == 0) {
      progress->step(iteration < 0 ? fmt::format("T = {}: warm-up", plan.num_tokens)
                                   : fmt::format("T = {}: iteration {} of {}", plan.num_tokens, iteration + 1,
                                                 plan.num_iterations));
    }
    for (const Measured& measured : all) {
      if (Status status = context.barrier(); !status) return status;
      if (operations.late_ns() > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(operations.late_ns()));
      const std::int64_t start_ns = now_ns();
      if (Status status = measured.run(); !status) return status;
      const std::int64_t end_ns = now_ns();
      if (iteration < 0) continue;
      const auto index = static_cast<std::size_t>(iteration);
      area.series(measured.series)[index] = {start_ns, end_ns};
      if (measured.send) area.series(*measured.send)[index] = {start_ns, operations.sent_ns()};
    }
  }
  return {};
}

}  // namespace

Status run_bench_rank(const BenchPlan& plan, RankContext& context) {
  Progress progress("bench", context.rank() == 0);
  progress.step(fmt::format("T = {}: set up and check", plan.num_tokens));
  Operations operations(plan, context);
  if (Status status = operations.set_up(); !status) return status;
  MutableBenchArea(plan, context.result()).rows() = operations.rows();
  if (plan.on_gpu()) {
    if (Status status = time_on_gpu(plan, operations, context, &progress); !status) return status;
  } else {
    if (Status status = operations.check(); !status) return status;
    MutableBenchArea(plan, context.result()).wire() = operations.wire();
    if (Status status = time_on_host(plan, operations, context, &progress); !status) return status;
  }
  progress.clear();
  return operations.tear_down();
}

}  // namespace ferry::tools
