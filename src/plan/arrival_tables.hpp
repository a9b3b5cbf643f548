#ifndef FERRY_PLAN_ARRIVAL_TABLES_HPP
#define FERRY_PLAN_ARRIVAL_TABLES_HPP

/// What a dispatch by token brought, row by row: the checked arguments of arrival_tables, what a thread writes for one
/// row, and the loop on the host.

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Outputs that are null are not written; what only they need may be null too.
struct ArrivalParams {
  const std::int32_t* source = nullptr;  ///< [N, 2]
  const void* ids = nullptr;             ///< [N, K]
  bool wide_ids = false;                 ///< i64, else i32
  int num_topk = 1;
  int num_ranks = 1;
  std::int64_t num_rows = 0;    ///< N
  std::int64_t max_tokens = 1;  ///< M
  const std::int32_t* rows_per_expert = nullptr;
  std::int64_t num_experts = 0;  ///< L
  std::int64_t expert_alignment = 1;
  const std::int64_t* sent_ids = nullptr;
  std::int64_t num_sent_ids = 0;  ///< T * K

  std::int32_t* origin = nullptr;             ///< [N, 2 + K]
  std::int32_t* rows_through_rank = nullptr;  ///< [R]
  std::int32_t* expert_ends = nullptr;        ///< [L]
  std::int64_t* sent_ids_copy = nullptr;

  /// R for a row without a token, and for what a dispatch that failed has left there.
  FERRY_HOST_DEVICE int source_rank(std::int64_t row) const {
    const std::int32_t rank = source[2 * row];
    return rank >= 0 && rank < num_ranks ? rank : num_ranks;
  }
  FERRY_HOST_DEVICE bool is_local(std::int64_t entry) const {
    return wide_ids ? static_cast<const std::int64_t*>(ids)[entry] >= 0
                    : static_cast<const std::int32_t*>(ids)[entry] >= 0;
  }
  FERRY_HOST_DEVICE std::int32_t aligned_rows(std::int64_t expert) const {
    const std::int64_t rows = rows_per_expert[expert];
    return static_cast<std::int32_t>((rows + expert_alignment - 1) / expert_alignment * expert_alignment);
  }
};

FERRY_HOST_DEVICE inline void write_origin(const ArrivalParams& params, std::int64_t row) {
  const int rank = params.source_rank(row);
  const std::int32_t token = params.source[2 * row + 1];
  const bool spare = rank == params.num_ranks || token < 0 || token >= params.max_tokens;
  int last = -1;
  for (int k = 0; !spare && k < params.num_topk; ++k) {
    if (params.is_local(row * params.num_topk + k)) last = k;
  }
  std::int32_t* const origin = params.origin + row * (2 + params.num_topk);
  origin[0] = spare ? -1 : static_cast<std::int32_t>(rank * params.max_tokens) + token;
  origin[1] = spare ? -1 : rank * params.num_topk + last;
  for (int k = 0; k < params.num_topk; ++k) origin[2 + k] = -1;
}

/// The rows through each rank whose last row this is, and those through the ranks before the first row's.
FERRY_HOST_DEVICE inline void write_rank_end(const ArrivalParams& params, std::int64_t row) {
  const int rank = params.source_rank(row);
  const int next = row + 1 < params.num_rows ? params.source_rank(row + 1) : params.num_ranks;
  for (int ended = rank; ended < next; ++ended) {
    params.rows_through_rank[ended] = static_cast<std::int32_t>(row + 1);
  }
  for (int before = 0; row == 0 && before < rank; ++before) params.rows_through_rank[before] = 0;
}

void write_arrivals(const ArrivalParams& params);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_ARRIVAL_TABLES_HPP
