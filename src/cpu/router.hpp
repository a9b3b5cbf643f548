#ifndef FERRY_CPU_ROUTER_HPP
#define FERRY_CPU_ROUTER_HPP

/// The arithmetic of route on one rank, in host memory: counts out of ids, and slots out of everybody's counts. How the
/// counts travel is the caller's business.

#include <cstdint>
#include <memory>
#include <vector>

#include "core/backend.hpp"
#include "cpu/cpu_routing.hpp"

namespace ferry::cpu {

/// What every rank must know of one source rank.
struct SourceCounts {
  const std::int32_t* rank_counts = nullptr;    ///< [R] its tokens for each rank
  const std::int32_t* expert_counts = nullptr;  ///< [E] its distinct (token, expert) pairs for each expert
  std::int64_t num_entries = 0;                 ///< T * K
  std::int64_t max_recv_rows = 0;
};

/// One route, step by step in the order of the methods.
class Router {
 public:
  /// `state` receives what the methods find.
  Router(const RouteCall& call, const Topology& topology, std::shared_ptr<CpuRouting> state);

  void copy_inputs();
  /// This rank's own counts.
  void fill_counts(std::int32_t* rank_counts, std::int32_t* expert_counts) const;
  /// Source tokens of each run one after the other; see plan::RouteTables::tokens. Runs are counted by `counts`.
  void fill_tokens(const std::int32_t* counts, std::int32_t* tokens) const;

  /// Everybody's counts, by rank; what they point to outlives the router. False: they exceed that rank's entries.
  bool add_source(const SourceCounts& source);
  /// After all sources were added.
  void sum_sources();
  Status check_capacity() const;
  void place_tokens();
  /// Counts rows by rank, and makes source_table with no token in any row; the caller fills it in.
  void begin_sources();
  /// Enters into source_table which rank each row's token comes from, as far as counts tell, and -1 for the token.
  void name_sources();
  /// Fills the rest of the state.
  void finish();

  bool by_rank() const { return by_rank_; }
  std::size_t num_runs() const { return by_rank_ ? num_ranks_ : num_experts_; }
  std::size_t owner(std::size_t expert) const { return static_cast<std::size_t>(call_.expert_to_rank[expert]); }
  const SourceCounts& source(std::size_t rank) const { return sources_[rank]; }
  /// Rows of a destination: its tokens, or its experts' groups.
  std::int64_t rows_of(std::size_t rank) const;
  /// Rows of a destination that come from a source.
  std::int64_t rows_between(std::size_t source_rank, std::size_t rank) const;
  /// [E] first row of the expert's group on its owner.
  const std::vector<std::int64_t>& expert_first_row() const { return expert_first_row_; }

 private:
  /// First row, on the owner, of the rows that this rank sends for each run (a rank or an expert).
  std::vector<std::int64_t> first_rows() const;
  std::int64_t local_experts_of(std::size_t rank) const;

  const RouteCall& call_;
  std::size_t num_ranks_;
  std::size_t num_experts_;
  std::size_t my_rank_;
  bool by_rank_;                                // runs are destination ranks (kTokens), else experts
  std::vector<SourceCounts> sources_;           // by rank
  std::vector<std::int64_t> expert_first_row_;  // [E]
  std::vector<std::int64_t> expert_totals_;     // [E]
  std::shared_ptr<CpuRouting> state_;
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_ROUTER_HPP
