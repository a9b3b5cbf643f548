#ifndef FERRY_PLAN_ROUTE_TABLES_HPP
#define FERRY_PLAN_ROUTE_TABLES_HPP

/// Tables that a source publishes at route, for every rank to read.

#include <cstddef>
#include <cstdint>

#include "plan/carver.hpp"

namespace ferry::plan {

struct RouteTables {
  struct Shape {
    std::size_t num_ranks = 0;
    std::size_t num_experts = 0;
    std::size_t num_entries = 0;  ///< bound on (token, destination) pairs: T * K
  };

  std::int32_t* rank_counts = nullptr;    ///< [R] tokens for each destination rank
  std::int32_t* expert_counts = nullptr;  ///< [E] distinct (token, expert) pairs for each expert
  /// Source tokens in ascending order, one run after the other. kTokens: a run per destination rank, of rank_counts
  /// each. kExperts, kSlab: a run per expert, of expert_counts each.
  std::int32_t* tokens = nullptr;
  std::size_t size_bytes = 0;

  /// Pointers into `base`; with a null base only `size_bytes`.
  FERRY_HOST_DEVICE static constexpr RouteTables at(std::byte* base, const Shape& shape) {
    Carver carver(base);
    RouteTables tables;
    tables.rank_counts = carver.take<std::int32_t>(shape.num_ranks);
    tables.expert_counts = carver.take<std::int32_t>(shape.num_experts);
    tables.tokens = carver.take<std::int32_t>(shape.num_entries);
    tables.size_bytes = carver.used_bytes();
    return tables;
  }
};

}  // namespace ferry::plan

#endif  // FERRY_PLAN_ROUTE_TABLES_HPP
