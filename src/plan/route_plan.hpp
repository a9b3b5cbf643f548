#ifndef FERRY_PLAN_ROUTE_PLAN_HPP
#define FERRY_PLAN_ROUTE_PLAN_HPP

/// Arithmetic of route: counts from expert ids, and rows from the counts of all ranks. Pure functions over flat arrays;
/// exchanging the counts is the caller's task.
///
/// The rows of a destination form *runs*: one per (source, destination) in layout kTokens, one per (source, expert) in
/// the layouts grouped by expert. A run's rows are consecutive and in the order of the source's tokens, so a row is the
/// run's first row (a prefix sum over the sources before it) plus the token's position in the run.

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/routing.hpp"
#include "ferry/status.hpp"
#include "plan/destination.hpp"
#include "plan/to_size.hpp"

namespace ferry::plan {

/// Options of a route that determine its rows; equal on all ranks.
struct RouteShape {
  Layout layout = Layout::kTokens;
  std::size_t num_ranks = 1;
  std::size_t num_experts = 0;
  std::size_t num_topk = 0;
  std::int64_t expert_alignment = 1;
  std::int64_t slab_capacity = 0;
  std::span<const std::int32_t> expert_to_rank;  ///< [E]

  /// Whether a run is a destination rank (kTokens) rather than an expert.
  bool by_rank() const { return layout == Layout::kTokens; }
  std::size_t num_runs() const { return by_rank() ? num_ranks : num_experts; }
  std::size_t owner(std::size_t expert) const { return static_cast<std::size_t>(expert_to_rank[expert]); }
  /// Rank that receives a run.
  std::size_t rank_of_run(std::size_t run) const { return by_rank() ? run : owner(run); }
};

/// Counts of one source rank that every rank needs.
struct SourceCounts {
  const std::int32_t* rank_counts = nullptr;    ///< [R] its tokens for each rank
  const std::int32_t* expert_counts = nullptr;  ///< [E] its distinct (token, expert) pairs for each expert
  std::int64_t num_entries = 0;                 ///< T * K
  std::int64_t max_recv_rows = 0;               ///< 0: not bounded

  const std::int32_t* of_runs(const RouteShape& shape) const { return shape.by_rank() ? rank_counts : expert_counts; }
};

/// Counts of all ranks, by rank.
using AllCounts = std::span<const SourceCounts>;

/// Counts one rank's tokens. `ids` [T, K], -1 for no expert; writes `rank_counts` [R] and `expert_counts` [E].
void count_tokens(const RouteShape& shape, std::span<const std::int64_t> ids, std::int32_t* rank_counts,
                  std::int32_t* expert_counts);

/// Lists the source tokens of each run, one run after the other (see RouteTables::tokens). `counts` [runs] are those of
/// count_tokens.
void list_run_tokens(const RouteShape& shape, std::span<const std::int64_t> ids, const std::int32_t* counts,
                     std::int32_t* tokens);

/// Whether no count is negative and their sum is at most the source's number of entries.
bool counts_fit(const RouteShape& shape, const SourceCounts& source);

/// Number of rows of each expert, and the first on its owner. Groups of one owner follow each other in ascending expert
/// order.
struct ExpertGroups {
  std::vector<std::int64_t> num_rows;    ///< [E] without gaps
  std::vector<std::int64_t> first_rows;  ///< [E]
};
ExpertGroups group_experts(const RouteShape& shape, AllCounts sources);

/// Used rows of `rank`: its tokens, or its experts' groups with the gaps between them.
std::int64_t rows_on_rank(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups, std::size_t rank);
/// Rows of `rank` from one source.
std::int64_t rows_from_source(const RouteShape& shape, const SourceCounts& source, std::size_t rank);

/// kCapacity: `rank` would receive more rows than its row_limit (slots.hpp).
Status too_many_rows(std::int64_t rank, std::int64_t num_rows, std::int64_t max_recv_rows);
/// kCapacity: an expert of `rank` would receive more rows than its part of the slab has.
Status full_slab(std::int64_t rank, std::int64_t expert, std::int64_t num_rows, std::int64_t slab_capacity);

/// Checks that every rank has room for its rows. Gives the same result on all ranks.
/// @errors kCapacity, naming the rank and the option to raise
Status check_capacity(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups);

/// Destinations of the entries of one rank's tokens.
struct TokenPlan {
  std::vector<std::int32_t> slots;              ///< [T, K] row on the owner; -1 if there is no expert
  std::vector<Destination> destinations;        ///< destinations of all tokens, in order
  std::vector<std::int32_t> first_destination;  ///< [T + 1]
  std::vector<std::int64_t> num_rows_to_rank;   ///< [R]
};
/// Places one rank's tokens. `plan`: a plan no longer needed, whose memory is reused.
TokenPlan place_tokens(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups, std::size_t my_rank,
                       std::span<const std::int64_t> ids, TokenPlan plan = {});

/// Calls fn(run, source, first row, number of rows) for every run that `rank` receives, in the order of its sources.
template <typename Function>
void for_each_received_run(const RouteShape& shape, AllCounts sources, const ExpertGroups& groups, std::size_t rank,
                           Function&& fn) {
  std::vector<std::int64_t> next_row = groups.first_rows;
  if (shape.by_rank()) next_row.assign(shape.num_ranks, 0);
  for (std::size_t source = 0; source < sources.size(); ++source) {
    const std::int32_t* const counts = sources[source].of_runs(shape);
    for (std::size_t run = 0; run < shape.num_runs(); ++run) {
      if (shape.rank_of_run(run) != rank) continue;
      fn(run, source, next_row[run], counts[run]);
      next_row[run] += counts[run];
    }
  }
}

}  // namespace ferry::plan

#endif  // FERRY_PLAN_ROUTE_PLAN_HPP
