#ifndef FERRY_TESTS_GPU_LATENCY_GROUP_HPP
#define FERRY_TESTS_GPU_LATENCY_GROUP_HPP

/// Groups on GPUs that make calls of latency mode, and one rank's tensors for a dispatch and a combine in a row.

#include <cstdint>
#include <functional>
#include <vector>

#include "gpu/gpu_group.hpp"
#include "support/latency_check.hpp"

namespace ferry::test {

/// Cases of equal shapes with other ids. `idle_tail`: also with other numbers of tokens that count. `ranks_per_node`: 0
/// for all.
std::vector<PreparedCase> latency_cases_of_equal_shapes(int num_ranks, int num_cases, bool idle_tail = false,
                                                        int ranks_per_node = 0, std::int64_t hidden = 1040);

struct LatencyGroup {
  RankKind kind = RankKind::kThreads;
  int num_ranks = 1;
  std::int64_t timeout_ns = 0;  ///< 0: the timeout of other groups
};

/// Options of a group that can make calls of these cases.
GroupOptions latency_group_options(const std::vector<PreparedCase>& cases, std::int64_t timeout_ns = 0);

/// Runs `body` on every rank, a thread each, with a new group that has memory for these cases.
void run_latency_group(const LatencyGroup& run, const std::vector<PreparedCase>& cases,
                       const std::function<void(RankContext&, Group&)>& body);

/// One dispatch, and one combine of the slab that answers it, one after the other on a stream.
class LatencyPair {
 public:
  LatencyPair(RankContext& context, Group& group, const PreparedCase& prepared);

  /// Makes both calls add their waits for each rank to `times_ns`, [R] i64. Call before the next start.
  void count_waits(const TensorView& times_ns) {
    dispatch_.options.wait_times_ns = combine_.options.wait_times_ns = times_ns;
  }
  /// Puts the pair on the stream, whole or as four halves.
  Status start(Group& group, Stream stream, bool split);
  /// The same in two steps: the first of four halves, and the others.
  Status send(Group& group, Stream stream);
  Status finish(Group& group, Stream stream);
  /// Routing of the latest start. The next start destroys it, so a graph of several starts needs copies.
  const Routing& routing() const { return routing_; }
  void expect_received(RankContext& context) const;
  /// Fills the same tensors for a case of equal shapes.
  void refill(const RankContext& context, const PreparedCase& prepared);

 private:
  const PreparedCase* prepared_;
  LatencyDispatchTensors dispatch_;
  LatencyCombineTensors combine_;
  Routing routing_;
};

}  // namespace ferry::test

#endif  // FERRY_TESTS_GPU_LATENCY_GROUP_HPP
