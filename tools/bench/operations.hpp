#ifndef FERRY_TOOLS_BENCH_OPERATIONS_HPP
#define FERRY_TOOLS_BENCH_OPERATIONS_HPP

/// The measured calls of one rank, on its buffers, and the check that they move the right bytes.

#include <memory>
#include <vector>

#include "bench/bench_buffers.hpp"
#include "bench/bench_plan.hpp"
#include "bench/bench_result.hpp"
#include "common/launcher.hpp"
#include "ferry/group.hpp"

namespace ferry::tools {

class Operations {
 public:
  Operations(const BenchPlan& plan, RankContext& context);

  /// Make the group, route once, allocate, fill. Collective, as are the calls below.
  Status set_up();
  /// Run each measured operation once and compare every row with what it must be.
  /// @errors kInternal naming the first row that is wrong
  Status check();

  Status route();
  Status dispatch();
  Status combine();
  Status tear_down() { return group_->destroy(); }

  RankRows rows() const;
  const BenchBuffers& buffers() const { return buffers_; }
  /// Rows that each token of this rank becomes.
  const std::vector<int>& rows_per_token() const { return rows_per_token_; }

 private:
  RouteOptions route_options() const;
  Status find_slab_capacity();
  Status check_routing() const;
  Status check_dispatch();
  Status check_combine();
  /// Factor by which an identity expert scales token `token` of this rank.
  float combined_factor(std::int64_t token) const;

  const BenchPlan& plan_;
  RankContext& context_;
  RowPattern pattern_;
  RoutingTable table_;
  std::vector<int> rows_per_token_;
  std::shared_ptr<Group> group_;
  std::int64_t slab_capacity_ = 0;
  Routing routing_;
  BenchBuffers buffers_;
};

}  // namespace ferry::tools

#endif  // FERRY_TOOLS_BENCH_OPERATIONS_HPP
