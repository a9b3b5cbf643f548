#ifndef FERRY_CPU_CPU_ROUTING_HPP
#define FERRY_CPU_CPU_ROUTING_HPP

/// A Routing's tables in host memory.

#include <cstdint>
#include <vector>

#include "core/routing_state.hpp"

namespace ferry::cpu {

/// One of a token's places: entry `topk` of the token takes row `row` on rank `rank`.
struct Place {
  std::int32_t row = 0;
  std::int16_t rank = 0;
  std::uint8_t topk = 0;
  bool first = false;  ///< false: the token's place before this one is the same row
};

struct CpuRouting : RoutingState {
  std::vector<std::int64_t> ids;           ///< [T, K]
  std::vector<float> weights;              ///< [T, K] or empty
  std::vector<std::int32_t> slot_table;    ///< [T, K]
  std::vector<std::int32_t> source_table;  ///< [num_used_rows, 2]
  std::int32_t num_used_rows_i32 = 0;

  std::vector<Place> places;                   ///< of all tokens in order, each token's ascending by (rank, row, topk)
  std::vector<std::int32_t> first_place;       ///< [T + 1]
  std::vector<std::int64_t> num_rows_on_rank;  ///< [R] used rows of each rank
  std::vector<std::int64_t> num_tokens_of_rank;  ///< [R] T of each rank
  std::vector<std::int32_t> local_expert;        ///< [E] index among this rank's experts, -1 elsewhere
};

}  // namespace ferry::cpu

#endif  // FERRY_CPU_CPU_ROUTING_HPP
