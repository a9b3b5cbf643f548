#include "support/layout_case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace ferry::test {
namespace {

std::int64_t draw(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

/// Rank r owns experts from r*E/R to (r+1)*E/R, both rounded down.
std::int64_t default_owner_of(std::int64_t expert, std::int64_t num_experts, std::int64_t num_ranks) {
  std::int64_t rank = 0;
  while ((rank + 1) * num_experts / num_ranks <= expert) ++rank;
  return rank;
}

}  // namespace

std::string LayoutCase::name() const {
  return fmt::format("T={} K={} E={} R={} ranks_per_node={}{}", num_tokens, num_topk, num_experts, num_ranks,
                     ranks_per_node, owners.empty() ? "" : " placed");
}

LayoutCounts LayoutCase::expected() const {
  const auto size = [](std::int64_t value) { return static_cast<std::size_t>(value); };
  LayoutCounts counts{std::vector<std::int32_t>(size(num_ranks)), std::vector<std::int32_t>(size(num_nodes())),
                      std::vector<std::int32_t>(size(num_experts)),
                      std::vector<std::uint8_t>(size(num_tokens * num_ranks))};
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::set<std::int64_t> ranks;
    std::set<std::int64_t> nodes;
    for (int k = 0; k < num_topk; ++k) {
      const std::int64_t expert = ids[size(token * num_topk + k)];
      if (expert < 0 || expert >= num_experts) continue;
      ++counts.per_expert[size(expert)];
      const std::int64_t rank =
          owners.empty() ? default_owner_of(expert, num_experts, num_ranks) : owners[size(expert)];
      ranks.insert(rank);
      nodes.insert(rank / ranks_per_node);
    }
    for (const std::int64_t rank : ranks) {
      ++counts.per_rank[size(rank)];
      counts.in_rank[size(token * num_ranks + rank)] = 1;
    }
    for (const std::int64_t node : nodes) ++counts.per_node[size(node)];
  }
  return counts;
}

LayoutCase draw_layout_case(std::mt19937_64& random, std::int64_t max_tokens, int max_ranks) {
  LayoutCase one;
  one.num_ranks = static_cast<int>(draw(random, 1, max_ranks));
  one.ranks_per_node = static_cast<int>(draw(random, 1, one.num_ranks));
  one.num_experts = draw(random, 1, 300);
  one.num_topk = static_cast<int>(draw(random, 1, 32));
  one.num_tokens = draw(random, 0, 4) == 0 ? 0 : draw(random, 1, max_tokens);
  if (draw(random, 0, 1) == 1) {
    for (std::int64_t expert = 0; expert < one.num_experts; ++expert) {
      one.owners.push_back(static_cast<std::int32_t>(draw(random, 0, one.num_ranks - 1)));
    }
  }
  for (std::int64_t entry = 0; entry < one.num_tokens * one.num_topk; ++entry) {
    one.ids.push_back(draw(random, -2, one.num_experts + 1));
  }
  return one;
}

}  // namespace ferry::test
