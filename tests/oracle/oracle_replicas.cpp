#include <algorithm>
#include <string>

#include "oracle/oracle.hpp"

namespace ferry::oracle {
namespace {

/// Homes of an expert that tokens of `rank` choose from, in ascending order; empty if all are on masked ranks.
std::vector<std::int64_t> homes_of(const World& world, const std::vector<std::int32_t>& owners, std::int64_t logical,
                                   int rank, const std::vector<int>& masked) {
  const Placement& placement = world.options.placement;
  std::vector<std::int64_t> on_rank;
  std::vector<std::int64_t> on_node;
  std::vector<std::int64_t> anywhere;
  for (std::size_t physical = 0; physical < owners.size(); ++physical) {
    if (placement.physical_to_logical[physical] != logical) continue;
    if (std::find(masked.begin(), masked.end(), owners[physical]) != masked.end()) continue;
    const auto id = static_cast<std::int64_t>(physical);
    anywhere.push_back(id);
    if (owners[physical] / world.ranks_per_node == rank / world.ranks_per_node) on_node.push_back(id);
    if (owners[physical] == rank) on_rank.push_back(id);
  }
  if (placement.choice == ReplicaChoice::kRoundRobin) return anywhere;
  return !on_rank.empty() ? on_rank : !on_node.empty() ? on_node : anywhere;
}

}  // namespace

World physical_world(const World& world, const std::vector<int>& masked) {
  const Placement& placement = world.options.placement;
  if (!placement.present()) return world;
  World physical = world;
  physical.options.placement = {};
  physical.options.num_experts = static_cast<std::int64_t>(placement.physical_to_logical.size());
  physical.options.expert_to_rank = placement.physical_to_rank;
  const std::vector<std::int32_t> owners = expert_owners(physical);
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    std::vector<std::int64_t>& ids = physical.ranks[static_cast<std::size_t>(rank)].topk_idx;
    for (std::size_t entry = 0; entry < ids.size(); ++entry) {
      if (ids[entry] < 0) continue;
      std::vector<std::int64_t> homes = homes_of(world, owners, ids[entry], rank, masked);
      if (homes.empty()) homes = homes_of(world, owners, ids[entry], rank, {});
      const std::size_t token = entry / static_cast<std::size_t>(world.num_topk);
      if (homes.empty() && placement.allow_homeless) {
        ids[entry] = -1;
        continue;
      }
      ids[entry] = homes.at((token + static_cast<std::size_t>(rank)) % homes.size());
    }
  }
  return physical;
}

std::vector<std::int64_t> count_rows(const World& world, std::size_t rank) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world.options.num_experts), 0);
  const RankTokens& tokens = world.ranks[rank];
  for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
    const std::int64_t* ids = tokens.topk_idx.data() + token * world.num_topk;
    for (std::int64_t expert = 0; expert < world.options.num_experts; ++expert) {
      bool named = false;
      for (int k = 0; k < world.num_topk; ++k) named = named || ids[k] == expert;
      if (named) ++counts[static_cast<std::size_t>(expert)];
    }
  }
  return counts;
}

}  // namespace ferry::oracle
