#include "support/random_world.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

namespace ferry::test {
namespace {

using Random = std::mt19937_64;

std::int64_t draw(Random& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

bool one_in(Random& random, std::int64_t n) { return draw(random, 1, n) == 1; }

/// Weights that reveal mistakes: both signs, both zeros, a subnormal, infinity. No NaN: sums of NaNs have no fixed
/// bits.
float draw_weight(Random& random) {
  constexpr std::array<float, 5> kSpecial = {0.0F, -0.0F, 1.0F, 0x1p-140F, std::numeric_limits<float>::infinity()};
  if (one_in(random, 12)) return kSpecial[static_cast<std::size_t>(draw(random, 0, kSpecial.size() - 1))];
  return std::normal_distribution<float>(0.2F, 0.5F)(random);
}

std::int64_t count_tokens(const WorldSpec& spec, int rank, Random& random) {
  switch (spec.counts) {
    case TokenCounts::kEven:
      return spec.max_tokens;
    case TokenCounts::kUneven:
      return draw(random, 0, spec.max_tokens);
    case TokenCounts::kSomeZero:
      return rank % 2 == 0 ? 0 : spec.max_tokens;
    case TokenCounts::kAllZero:
      return 0;
  }
  return 0;
}

/// Draws one token's ids.
class IdSource {
 public:
  explicit IdSource(const WorldSpec& spec) : spec_(spec), experts_(static_cast<std::size_t>(spec.num_experts)) {
    std::iota(experts_.begin(), experts_.end(), 0);
    for (std::size_t expert = 0; expert < experts_.size(); ++expert)
      popularity_.push_back(1.0 / static_cast<double>(expert + 1));
  }

  std::vector<std::int64_t> token(Random& random) {
    const auto num_topk = static_cast<std::size_t>(spec_.num_topk);
    std::vector<std::int64_t> ids(num_topk, -1);
    switch (spec_.pattern) {
      case RoutingPattern::kRandom:
        std::shuffle(experts_.begin(), experts_.end(), random);
        for (std::size_t k = 0; k < num_topk; ++k)
          if (!one_in(random, 10)) ids[k] = experts_[k % experts_.size()];
        break;
      case RoutingPattern::kZipf:
        draw_popular(random, ids);
        break;
      case RoutingPattern::kOneHot:
        for (std::size_t k = 0; k < num_topk; ++k)
          if (k == 0 || one_in(random, 2)) ids[k] = spec_.num_experts / 2;
        std::shuffle(ids.begin(), ids.end(), random);
        break;
      case RoutingPattern::kNone:
        break;
      case RoutingPattern::kDuplicates:
        for (std::int64_t& id : ids) {
          const std::int64_t choice = draw(random, 0, 3);
          id = choice == 3 ? -1 : choice * (spec_.num_experts - 1) / 2;
        }
        break;
    }
    return ids;
  }

 private:
  void draw_popular(Random& random, std::vector<std::int64_t>& ids) {
    std::vector<double> left = popularity_;
    for (std::size_t k = 0; k < ids.size() && k < experts_.size(); ++k) {
      const std::size_t expert = std::discrete_distribution<std::size_t>(left.begin(), left.end())(random);
      ids[k] = static_cast<std::int64_t>(expert);
      left[expert] = 0;
    }
  }

  const WorldSpec spec_;
  std::vector<std::int64_t> experts_;
  std::vector<double> popularity_;
};

/// Takes all homes of some experts away. One physical expert stays in any case.
void take_homes(const WorldSpec& spec, Random& random, Placement& placement) {
  placement.allow_homeless = true;
  std::vector<std::int32_t>& homes = placement.physical_to_logical;
  std::vector<std::int32_t> experts(static_cast<std::size_t>(spec.num_experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::shuffle(experts.begin(), experts.end(), random);
  experts.resize(static_cast<std::size_t>(std::min(spec.num_homeless, spec.num_experts)));
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (i % 2 == 0) {
      std::replace(homes.begin(), homes.end(), experts[i], -1);
    } else {
      homes.erase(std::remove(homes.begin(), homes.end(), experts[i]), homes.end());
    }
  }
}

/// Draws a home for each expert and more homes for some of them, in random order.
Placement draw_placement(const WorldSpec& spec, Random& random) {
  Placement placement;
  placement.choice = spec.replica_choice;
  std::vector<std::int32_t>& homes = placement.physical_to_logical;
  homes.resize(static_cast<std::size_t>(spec.num_experts));
  std::iota(homes.begin(), homes.end(), 0);
  for (std::int64_t i = 0; i < spec.num_replicas; ++i) {
    const std::int64_t logical = one_in(random, 5) ? -1 : draw(random, 0, spec.num_experts - 1);
    homes.push_back(static_cast<std::int32_t>(logical));
  }
  std::shuffle(homes.begin(), homes.end(), random);
  if (spec.num_homeless > 0) take_homes(spec, random, placement);
  for (std::size_t i = 0; spec.custom_placement && i < homes.size(); ++i) {
    placement.physical_to_rank.push_back(static_cast<std::int32_t>(draw(random, 0, spec.num_ranks - 1)));
  }
  return placement;
}

std::int64_t busiest_expert_rows(oracle::World world) {
  world.options.layout = Layout::kTokens;
  world.options.slab_capacity = 0;
  const std::vector<oracle::RankRouting> routings = oracle::route(world).value();
  std::int64_t rows = 0;
  for (const oracle::RankRouting& routing : routings)
    for (std::int32_t count : routing.num_rows_per_local_expert) rows = std::max<std::int64_t>(rows, count);
  return rows;
}

}  // namespace

oracle::World make_world(const WorldSpec& spec) {
  Random random(spec.seed);
  oracle::World world;
  world.num_ranks = spec.num_ranks;
  world.ranks_per_node = spec.ranks_per_node == 0 ? spec.num_ranks : spec.ranks_per_node;
  world.num_topk = spec.num_topk;
  world.options.num_experts = spec.num_experts;
  world.options.layout = spec.layout;
  if (spec.layout == Layout::kExperts) world.options.expert_alignment = spec.expert_alignment;
  if (spec.num_replicas >= 0) {
    world.options.placement = draw_placement(spec, random);
  } else if (spec.custom_placement) {
    for (std::int64_t expert = 0; expert < spec.num_experts; ++expert)
      world.options.expert_to_rank.push_back(static_cast<std::int32_t>(draw(random, 0, spec.num_ranks - 1)));
  }

  IdSource ids(spec);
  for (int rank = 0; rank < spec.num_ranks; ++rank) {
    oracle::RankTokens tokens;
    tokens.num_tokens = count_tokens(spec, rank, random);
    for (std::int64_t token = 0; token < tokens.num_tokens; ++token) {
      for (std::int64_t id : ids.token(random)) {
        tokens.topk_idx.push_back(id);
        if (spec.weights) tokens.topk_weights.push_back(draw_weight(random));
      }
    }
    if (spec.idle_tail) {
      const std::int64_t num_counted = draw(random, 0, tokens.num_tokens);
      std::fill(tokens.topk_idx.begin() + num_counted * spec.num_topk, tokens.topk_idx.end(), -1);
    }
    world.ranks.push_back(std::move(tokens));
  }

  if (spec.fixed_rows > 0) {
    if (spec.layout == Layout::kSlab)
      world.options.slab_capacity = spec.fixed_rows;
    else
      world.max_recv_rows.assign(world.ranks.size(), spec.fixed_rows);
  } else if (spec.layout == Layout::kSlab) {
    world.options.slab_capacity =
        std::max<std::int64_t>(busiest_expert_rows(oracle::physical_world(world)) + spec.spare_slab_rows, 1);
  } else if (spec.spare_recv_rows >= 0) {
    const auto routings = oracle::route(oracle::physical_world(world)).value();
    for (const oracle::RankRouting& routing : routings)
      world.max_recv_rows.push_back(routing.num_used_rows + spec.spare_recv_rows);
  }
  return world;
}

std::int64_t num_counted_tokens(const oracle::RankTokens& tokens, int num_topk) {
  const auto last =
      std::find_if(tokens.topk_idx.rbegin(), tokens.topk_idx.rend(), [](std::int64_t id) { return id >= 0; });
  const std::int64_t num_entries = tokens.topk_idx.rend() - last;
  return (num_entries + num_topk - 1) / num_topk;
}

WorldSpec draw_world_spec(std::mt19937_64& random, int num_ranks) {
  WorldSpec spec;
  spec.num_ranks = num_ranks;
  spec.seed = random();
  spec.num_experts = one_in(random, 4) ? draw(random, 1, 3) : draw(random, 1, 40);
  spec.num_topk = static_cast<int>(one_in(random, 6) ? draw(random, 1, kMaxTopk) : draw(random, 1, 8));
  if (one_in(random, 6)) spec.num_topk = static_cast<int>(std::min<std::int64_t>(spec.num_experts, kMaxTopk));
  spec.max_tokens = one_in(random, 5) ? draw(random, 0, 3) : draw(random, 0, 24);
  spec.pattern = static_cast<RoutingPattern>(one_in(random, 2) ? 0 : draw(random, 0, 4));
  spec.counts = static_cast<TokenCounts>(one_in(random, 2) ? 1 : draw(random, 0, 3));
  spec.layout = static_cast<Layout>(draw(random, 0, 2));
  spec.expert_alignment = one_in(random, 2) ? 1 : draw(random, 2, 9);
  spec.spare_slab_rows = one_in(random, 2) ? 0 : draw(random, 1, 5);
  spec.spare_recv_rows = one_in(random, 2) ? -1 : draw(random, 0, 6);
  spec.custom_placement = one_in(random, 3);
  spec.weights = !one_in(random, 4);
  if (one_in(random, 3)) {
    spec.num_replicas = draw(random, 0, 8);
    spec.replica_choice = one_in(random, 3) ? ReplicaChoice::kRoundRobin : ReplicaChoice::kNearest;
    if (one_in(random, 3)) spec.num_homeless = draw(random, 1, spec.num_experts);
  }
  return spec;
}

}  // namespace ferry::test
