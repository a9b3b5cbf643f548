#ifndef FERRY_TOOLS_BENCH_OPERATIONS_HPP
#define FERRY_TOOLS_BENCH_OPERATIONS_HPP

/// Measured calls of one rank on its buffers, and the check that they move the right bytes.

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "bench/bench_buffers.hpp"
#include "bench/bench_plan.hpp"
#include "bench/bench_result.hpp"
#include "device/rank_device.hpp"
#include "ferry/group.hpp"
#include "run/launcher.hpp"

namespace ferry::tools {

class Operations {
 public:
  Operations(const BenchPlan& plan, RankContext& context);

  /// Creates the group, routes once, allocates and fills the buffers. Collective, like the calls below.
  Status set_up();
  /// Runs each measured operation once and compares every row with the expected one.
  /// @errors kInternal naming the first row that is wrong
  Status check();

  /// On a CUDA group dispatch, combine and possibly route only put work on the stream; `wait` returns their result.
  Status route();
  Status dispatch();
  Status combine();
  Status wait();

  /// Calls of latency mode and their references: route, dispatch and combine, as far as the operation has them.
  Status latency_dispatch();
  Status latency_combine();
  Status latency_pair();
  Status reference();
  /// Makes `num_pairs` pairs and keeps every Routing, because replays of a graph need them.
  Status latency_pairs_to_capture(int num_pairs);
  /// Time (now_ns) at which the send half of the latest call of latency mode returned.
  std::int64_t sent_ns() const { return sent_ns_; }
  /// Sets a function to call when the send half of a call of latency mode has returned; may be null.
  void on_sent(std::function<Status()> call) { on_sent_ = std::move(call); }
  /// Delay of this rank's timed calls after those of the other ranks.
  std::int64_t late_ns() const { return context_.rank() == plan_.num_ranks - 1 ? plan_.late_ns : 0; }
  Status tear_down() { return group_->destroy(); }

  /// Sets the options of the calls that follow. CUDA only.
  void use(const KernelOptions& kernel) { kernel_ = kernel; }
  const RankDevice& device() const { return device_; }

  RankRows rows() const;
  /// Traffic of `check` and of the route in `set_up`.
  const RankWire& wire() const { return wire_; }
  const BenchBuffers& buffers() const { return buffers_; }
  /// Number of rows of each token of this rank.
  const std::vector<int>& rows_per_token() const { return rows_per_token_; }

 private:
  RouteInput route_input() const;
  RouteOptions route_options() const;
  LatencyShape latency_shape() const;
  DType input_dtype() const;
  /// Routing of the calls that are checked.
  const Routing& checked_routing() const { return plan_.latency() ? latency_routing_ : routing_; }
  void retire(Routing routing);
  Status note_sent();
  Status place_ids();
  Status place_counters();
  LoadCounters counters() const;
  Status fill_inputs();
  /// [used rows, 2] source rank and token, in host memory.
  Result<std::vector<std::int32_t>> read_source() const;
  Status find_slab_capacity();
  Status check_routing() const;
  /// Checks the counts of one call.
  Status check_counters(const RoutingTable& picked) const;
  Status check_dispatch();
  Status check_scales(const std::vector<std::int32_t>& source);
  Status fill_combine_input();
  Status check_combine();
  Status check_weights();
  /// Runs `call` and records its network traffic, together with `formula_bytes`.
  Status metered(WireFigures* figures, std::int64_t formula_bytes, Status (Operations::*call)());
  struct ExpectedRow;
  /// Expected row after dispatch, by source rank and token.
  std::function<ExpectedRow(int, std::int64_t)> expected_rows() const;
  /// For each rank, the sum of the factors by which identity experts there scale token `token` of this rank.
  std::vector<float> factors_by_rank(std::int64_t token) const;
  /// For each rank, the weights of the rows there of token `token` of this rank, in the order in which combine adds
  /// them.
  std::vector<std::vector<float>> weights_by_rank(std::int64_t token) const;
  /// The same as check_combine() where rows, or sums of ranks, are quantised: sums of their values are not exact.
  Status check_fp8_combine();
  /// Result of combine for a value that returns multiplied by each of these factors.
  float expected_sum(float x, const std::vector<float>& factors) const;

  const BenchPlan& plan_;
  RankContext& context_;
  RowPattern pattern_;
  RoutingTable table_;
  std::vector<int> rows_per_token_;
  Placement placement_;
  RankDevice device_;
  KernelOptions kernel_;
  std::shared_ptr<Group> group_;
  std::int64_t slab_capacity_ = 0;
  Routing routing_;
  Routing latency_routing_;
  std::vector<Routing> retired_;   ///< CUDA: Routings of earlier calls, freed by `wait`
  std::vector<Routing> captured_;  ///< CUDA: Routings of graphs
  std::int64_t sent_ns_ = 0;
  std::function<Status()> on_sent_;
  BenchBuffers buffers_;
  RankWire wire_{};
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_OPERATIONS_HPP
