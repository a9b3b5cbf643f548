#ifndef FERRY_PLAN_ARRIVAL_TABLES_HPP
#define FERRY_PLAN_ARRIVAL_TABLES_HPP

/// Rows received by a dispatch by token: the checked arguments of arrival_tables, the tables of one row as one thread
/// writes them, and the loop on the host.

#include <cstdint>

#include "plan/host_device.hpp"

namespace ferry::plan {

/// Null outputs are not written; inputs that only those need may be null too.
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
  bool expand = false;  ///< needs rows_per_expert
  const std::int64_t* sent_ids = nullptr;
  std::int64_t num_sent_ids = 0;  ///< T * K

  std::int32_t* origin = nullptr;             ///< [N, 2 + K]
  std::int32_t* rows_through_rank = nullptr;  ///< [R]
  std::int32_t* expert_ends = nullptr;        ///< [L]
  std::int64_t* sent_ids_copy = nullptr;
  std::int32_t* rows_of_expert = nullptr;  ///< [L]
  std::int8_t* last_equal = nullptr;       ///< [N, K]

  /// R for a row without a token, and for a value left there by a failed dispatch.
  FERRY_HOST_DEVICE int source_rank(std::int64_t row) const {
    const std::int32_t rank = source[2 * row];
    return rank >= 0 && rank < num_ranks ? rank : num_ranks;
  }
  FERRY_HOST_DEVICE std::int64_t id(std::int64_t entry) const {
    return wide_ids ? static_cast<const std::int64_t*>(ids)[entry] : static_cast<const std::int32_t*>(ids)[entry];
  }
  FERRY_HOST_DEVICE bool is_spare(std::int64_t row) const {
    const std::int32_t token = source[2 * row + 1];
    return source_rank(row) == num_ranks || token < 0 || token >= max_tokens;
  }
  /// Last choice, in a row with a token, that has the same expert as choice k; -1 if that expert is not here.
  FERRY_HOST_DEVICE int last_choice(std::int64_t row, int k) const {
    const std::int64_t expert = id(row * num_topk + k);
    if (expert < 0 || expert >= num_experts) return -1;
    int last = num_topk - 1;
    while (last > k && id(row * num_topk + last) != expert) --last;
    return last;
  }
  FERRY_HOST_DEVICE std::int32_t aligned_rows(std::int64_t expert) const {
    const std::int64_t rows = rows_per_expert[expert];
    return static_cast<std::int32_t>((rows + expert_alignment - 1) / expert_alignment * expert_alignment);
  }
};

/// Writes a row of origin except its slots, which `expand` adds separately.
FERRY_HOST_DEVICE inline void write_origin(const ArrivalParams& params, std::int64_t row) {
  const int num_topk = params.num_topk;
  const bool spare = params.is_spare(row);
  int last = -1;
  for (int k = 0; !spare && k < num_topk; ++k) {
    if (params.id(row * num_topk + k) >= 0) last = k;
  }
  std::int32_t* const origin = params.origin + row * (2 + num_topk);
  origin[0] =
      spare ? -1 : static_cast<std::int32_t>(params.source_rank(row) * params.max_tokens) + params.source[2 * row + 1];
  origin[1] = spare ? -1 : params.source_rank(row) * num_topk + last;
  for (int k = 0; k < num_topk; ++k) {
    if (spare || !params.expand || params.last_choice(row, k) != k) origin[2 + k] = -1;
  }
}

FERRY_HOST_DEVICE inline void write_last_equal(const ArrivalParams& params, std::int64_t row) {
  const bool spare = params.is_spare(row);
  for (int k = 0; k < params.num_topk; ++k) {
    params.last_equal[row * params.num_topk + k] = static_cast<std::int8_t>(spare ? -1 : params.last_choice(row, k));
  }
}

/// Writes the row count through each rank that ends with this row; row 0 also writes those of the ranks before its own.
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
