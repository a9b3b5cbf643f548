#include "plan/arrival_tables.hpp"

#include <algorithm>

namespace ferry::plan {

void write_arrivals(const ArrivalParams& params) {
  for (std::int64_t row = 0; params.origin != nullptr && row < params.num_rows; ++row) write_origin(params, row);
  if (params.rows_through_rank != nullptr) {
    if (params.num_rows == 0) std::fill_n(params.rows_through_rank, params.num_ranks, 0);
    for (std::int64_t row = 0; row < params.num_rows; ++row) write_rank_end(params, row);
  }
  std::int32_t end = 0;
  for (std::int64_t expert = 0; params.expert_ends != nullptr && expert < params.num_experts; ++expert) {
    params.expert_ends[expert] = end += params.aligned_rows(expert);
  }
  if (params.sent_ids_copy != nullptr) std::copy_n(params.sent_ids, params.num_sent_ids, params.sent_ids_copy);
}

}  // namespace ferry::plan
