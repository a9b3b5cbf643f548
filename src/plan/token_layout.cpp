#include "plan/token_layout.hpp"

#include <algorithm>
#include <vector>

#include "plan/slots.hpp"
#include "plan/to_size.hpp"

namespace ferry::plan {
namespace {

template <typename Id>
class Counter {
 public:
  explicit Counter(const TokenLayoutParams& params)
      : params_(params), last_of_rank_(to_size(params.num_ranks), -1), last_of_node_(to_size(params.num_nodes()), -1) {}

  void count() {
    clear(params_.tokens_per_rank, params_.num_ranks);
    clear(params_.tokens_per_node, params_.num_nodes());
    clear(params_.entries_per_expert, params_.num_experts);
    if (params_.token_in_rank != nullptr) {
      std::fill_n(params_.token_in_rank, params_.num_tokens * params_.num_ranks, std::uint8_t{0});
    }
    const auto* ids = static_cast<const Id*>(params_.ids);
    for (std::int64_t token = 0; token < params_.num_tokens; ++token) {
      for (int k = 0; k < params_.num_topk; ++k) {
        const std::int64_t expert = ids[token * params_.num_topk + k];
        if (expert >= 0 && expert < params_.num_experts) count_entry(token, expert);
      }
    }
  }

 private:
  template <typename T>
  static void clear(T* counts, std::int64_t num_counts) {
    if (counts != nullptr) std::fill_n(counts, num_counts, T{0});
  }

  /// Counts a token once for each rank and node, however many of its entries go there.
  static void count_once(std::int64_t token, std::int64_t* last, std::int32_t* count) {
    if (*last == token) return;
    *last = token;
    if (count != nullptr) ++*count;
  }

  void count_entry(std::int64_t token, std::int64_t expert) {
    if (params_.entries_per_expert != nullptr) ++params_.entries_per_expert[expert];
    const std::int64_t rank = params_.expert_to_rank != nullptr
                                  ? params_.expert_to_rank[expert]
                                  : default_owner(expert, params_.num_experts, params_.num_ranks);
    if (rank < 0 || rank >= params_.num_ranks) return;
    const std::int64_t node = rank / params_.ranks_per_node;
    count_once(token, &last_of_rank_[to_size(rank)], at(params_.tokens_per_rank, rank));
    count_once(token, &last_of_node_[to_size(node)], at(params_.tokens_per_node, node));
    if (params_.token_in_rank != nullptr) params_.token_in_rank[token * params_.num_ranks + rank] = 1;
  }

  static std::int32_t* at(std::int32_t* counts, std::int64_t index) {
    return counts != nullptr ? counts + index : nullptr;
  }

  const TokenLayoutParams& params_;
  std::vector<std::int64_t> last_of_rank_;  // last token counted for each rank
  std::vector<std::int64_t> last_of_node_;
};

}  // namespace

void count_layout(const TokenLayoutParams& params) {
  if (params.wide_ids) {
    Counter<std::int64_t>(params).count();
  } else {
    Counter<std::int32_t>(params).count();
  }
}

}  // namespace ferry::plan
