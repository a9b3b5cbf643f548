#ifndef FERRY_TESTS_LAYOUT_CASE_HPP
#define FERRY_TESTS_LAYOUT_CASE_HPP

/// Random inputs of dispatch_layout, with expected results counted token by token with sets.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace ferry::test {

struct LayoutCounts {
  std::vector<std::int32_t> per_rank;
  std::vector<std::int32_t> per_node;
  std::vector<std::int32_t> per_expert;
  std::vector<std::uint8_t> in_rank;  ///< [T, R]

  bool operator==(const LayoutCounts&) const = default;
};

struct LayoutCase {
  std::int64_t num_tokens = 0;
  int num_topk = 1;
  std::int64_t num_experts = 1;
  int num_ranks = 1;
  int ranks_per_node = 1;
  std::vector<std::int32_t> owners;  ///< [E]; empty: the default placement
  std::vector<std::int64_t> ids;     ///< [T, K], some out of range

  int num_nodes() const { return (num_ranks + ranks_per_node - 1) / ranks_per_node; }
  std::string name() const;
  LayoutCounts expected() const;
};

/// `max_ranks`: largest R to draw.
LayoutCase draw_layout_case(std::mt19937_64& random, std::int64_t max_tokens, int max_ranks);

}  // namespace ferry::test

#endif  // FERRY_TESTS_LAYOUT_CASE_HPP
