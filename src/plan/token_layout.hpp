#ifndef FERRY_PLAN_TOKEN_LAYOUT_HPP
#define FERRY_PLAN_TOKEN_LAYOUT_HPP

/// Counts of one rank's tokens by rank, node and expert: the checked arguments, and the loop on the host.

#include <cstdint>

namespace ferry::plan {

/// Null outputs are not written.
struct TokenLayoutParams {
  const void* ids = nullptr;  ///< [T, K]
  bool wide_ids = false;      ///< i64, else i32
  std::int64_t num_tokens = 0;
  int num_topk = 1;
  std::int64_t num_experts = 1;
  int num_ranks = 1;
  int ranks_per_node = 1;
  const std::int32_t* expert_to_rank = nullptr;  ///< [E]; null: the default placement
  std::int32_t* tokens_per_rank = nullptr;       ///< [R]
  std::int32_t* tokens_per_node = nullptr;       ///< [nodes]
  std::int32_t* entries_per_expert = nullptr;    ///< [E]
  std::uint8_t* token_in_rank = nullptr;         ///< [T, R]

  int num_nodes() const { return (num_ranks + ranks_per_node - 1) / ranks_per_node; }
};

void count_layout(const TokenLayoutParams& params);

}  // namespace ferry::plan

#endif  // FERRY_PLAN_TOKEN_LAYOUT_HPP
