#include "plan/arrival_tables.hpp"

#include <algorithm>
#include <vector>

#include "plan/to_size.hpp"

namespace ferry::plan {
namespace {

/// Writes slots by expert, then by row, and the end of each expert's slots.
void write_slots(const ArrivalParams& params) {
  std::vector<std::int32_t> next(to_size(params.num_experts));
  std::int32_t start = 0;
  for (std::int64_t expert = 0; expert < params.num_experts; ++expert) {
    const std::int32_t num_rows = params.rows_per_expert[expert];
    next[to_size(expert)] = start;
    if (params.expert_ends != nullptr) params.expert_ends[expert] = start + num_rows;
    if (params.rows_of_expert != nullptr) params.rows_of_expert[expert] = num_rows;
    start += params.aligned_rows(expert);
  }
  for (std::int64_t row = 0; row < params.num_rows; ++row) {
    if (params.last_equal != nullptr) write_last_equal(params, row);
    if (params.origin == nullptr || params.is_spare(row)) continue;
    for (int k = 0; k < params.num_topk; ++k) {
      if (params.last_choice(row, k) != k) continue;
      const std::int64_t expert = params.id(row * params.num_topk + k);
      params.origin[row * (2 + params.num_topk) + 2 + k] = next[to_size(expert)]++;
    }
  }
}

}  // namespace

void write_arrivals(const ArrivalParams& params) {
  for (std::int64_t row = 0; params.origin != nullptr && row < params.num_rows; ++row) write_origin(params, row);
  if (params.rows_through_rank != nullptr) {
    if (params.num_rows == 0) std::fill_n(params.rows_through_rank, params.num_ranks, 0);
    for (std::int64_t row = 0; row < params.num_rows; ++row) write_rank_end(params, row);
  }
  if (params.expand) write_slots(params);
  std::int32_t end = 0;
  for (std::int64_t expert = 0; !params.expand && params.expert_ends != nullptr && expert < params.num_experts;
       ++expert) {
    params.expert_ends[expert] = end += params.aligned_rows(expert);
  }
  if (params.sent_ids_copy != nullptr) std::copy_n(params.sent_ids, params.num_sent_ids, params.sent_ids_copy);
}

}  // namespace ferry::plan
