#include "emulator/routed_tokens.hpp"

#include <algorithm>
#include <cstddef>
#include <random>
#include <tuple>

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

template <typename T>
T* take(NodeRanks& ranks, int rank, std::int64_t count) {
  return reinterpret_cast<T*>(ranks.allocate(rank, to_size(count + 1) * sizeof(T)));
}

/// Fills the tables of one rank's tokens, token by token.
class Filler {
 public:
  Filler(const RoutedTokens& routed, int rank, const RankTables& tables)
      : world_(routed.world),
        routing_(routed.routings[to_size(rank)]),
        tokens_(routed.world.ranks[to_size(rank)]),
        tables_(tables),
        owners_(oracle::expert_owners(routed.world)),
        sent_(to_size(world_.num_ranks)) {
    for (const oracle::RankRouting& one : routed.routings) {
      const std::vector<std::int32_t>& ids = one.local_expert_ids;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        local_experts_.resize(std::max(local_experts_.size(), to_size(ids[i]) + 1));
        local_experts_[to_size(ids[i])] = static_cast<std::int32_t>(i);
      }
    }
  }

  /// Returns the number of rows for each rank.
  std::vector<std::int32_t> fill() {
    for (std::int64_t token = 0; token < tables_.num_tokens; ++token) {
      if (token % RankTables::kTokensPerBlock == 0) copy_sent(token / RankTables::kTokensPerBlock);
      fill_token(token);
    }
    if (tables_.num_tokens == 0) copy_sent(0);
    copy_sent(tables_.num_blocks);
    return sent_;
  }

 private:
  void copy_sent(std::int64_t block) const { std::ranges::copy(sent_, tables_.block_ranks + block * world_.num_ranks); }

  void fill_token(std::int64_t token) {
    std::vector<std::tuple<int, std::int32_t, int>> found;  // rank, row, entry
    std::vector<int> missing;
    for (int k = 0; k < world_.num_topk; ++k) {
      const std::int64_t at = token * world_.num_topk + k;
      const std::int64_t expert = expert_of(token, k);
      tables_.homes[at] = expert < 0 ? -1 : cuda::home_of(owners_[to_size(expert)], local_experts_[to_size(expert)]);
      if (expert < 0) {
        missing.push_back(k);
      } else {
        found.emplace_back(owners_[to_size(expert)], routing_.slots[to_size(at)], k);
      }
    }
    std::ranges::sort(found);
    cuda::Destination* const destinations = tables_.destinations + token * world_.num_topk;
    int next = 0;
    for (const auto& [to_rank, row, topk] : found) {
      cuda::Destination& destination = destinations[next];
      const bool first_of_rank = next == 0 || destinations[next - 1].rank != to_rank;
      const bool first_of_row = first_of_rank || destinations[next - 1].row != row;
      if (first_of_rank) {
        tables_.sent_tokens[to_rank * tables_.num_tokens + sent_[to_size(to_rank)]] = static_cast<std::int32_t>(token);
        ++sent_[to_size(to_rank)];
      }
      destination.row = row;
      destination.token_row = tables_.rank_base[to_rank] + sent_[to_size(to_rank)] - 1;
      destination.rank = static_cast<std::int16_t>(to_rank);
      destination.topk = static_cast<std::uint8_t>(topk);
      destination.flags =
          static_cast<std::uint8_t>((first_of_rank ? cuda::kFirstOfRank : 0) | (first_of_row ? cuda::kFirstOfRow : 0));
      destination.local_expert = local_experts_[to_size(expert_of(token, topk))];
      ++next;
    }
    for (const int topk : missing) {
      destinations[next] = {};
      destinations[next].rank = -1;
      destinations[next++].topk = static_cast<std::uint8_t>(topk);
    }
  }

  std::int64_t expert_of(std::int64_t token, int topk) const {
    return tokens_.topk_idx[to_size(token * world_.num_topk + topk)];
  }

  const oracle::World& world_;
  const oracle::RankRouting& routing_;
  const oracle::RankTokens& tokens_;
  const RankTables& tables_;
  std::vector<std::int32_t> owners_;
  std::vector<std::int32_t> local_experts_;  // by expert
  std::vector<std::int32_t> sent_;           // for each rank
};

oracle::World draw_world(const RoutedSpec& spec) {
  oracle::World world;
  world.num_ranks = spec.num_ranks;
  world.ranks_per_node = spec.num_ranks;
  world.num_topk = spec.num_topk;
  world.options.num_experts = spec.num_experts;
  world.options.layout = spec.layout;
  draw_tokens(world, spec.num_tokens, spec.seed);
  return world;
}

}  // namespace

void draw_tokens(oracle::World& world, std::int64_t num_tokens, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    oracle::RankTokens& tokens = world.ranks.emplace_back();
    tokens.num_tokens = rank % 3 == 2 ? 0 : num_tokens + rank;
    for (std::int64_t i = 0; i < tokens.num_tokens * world.num_topk; ++i) {
      tokens.topk_idx.push_back(static_cast<std::int64_t>(random() % (to_size(world.options.num_experts) + 1)) - 1);
      tokens.topk_weights.push_back(normal(random));
    }
  }
}

RoutedTokens route_tokens(NodeRanks& ranks, const RoutedSpec& spec) {
  RoutedTokens routed;
  routed.world = draw_world(spec);
  routed.routings = oracle::route(routed.world).value();
  std::vector<std::int32_t> sent_before(to_size(spec.num_ranks));  // rows of the ranks before this one, for each rank
  for (int rank = 0; rank < spec.num_ranks; ++rank) {
    const oracle::RankRouting& routing = routed.routings[to_size(rank)];
    const oracle::RankTokens& tokens = routed.world.ranks[to_size(rank)];
    const std::int64_t num_tokens = tokens.num_tokens;
    RankTables& tables = routed.tables.emplace_back();
    tables.num_tokens = num_tokens;
    tables.num_blocks = static_cast<int>(
        std::max<std::int64_t>(1, (num_tokens + RankTables::kTokensPerBlock - 1) / RankTables::kTokensPerBlock));
    tables.summary = take<cuda::RouteSummary>(ranks, rank, 1);
    *tables.summary = {};
    tables.summary->valid = 1;
    tables.summary->num_used_rows = static_cast<std::int32_t>(routing.num_used_rows);
    tables.destinations = take<cuda::Destination>(ranks, rank, num_tokens * spec.num_topk);
    tables.homes = take<std::int32_t>(ranks, rank, num_tokens * spec.num_topk);
    tables.sent_tokens = take<std::int32_t>(ranks, rank, num_tokens * spec.num_ranks);
    tables.block_ranks = take<std::int32_t>(ranks, rank, (tables.num_blocks + 1) * spec.num_ranks);
    tables.rank_base = take<std::int32_t>(ranks, rank, spec.num_ranks);
    std::ranges::copy(sent_before, tables.rank_base);
    tables.weights = take<float>(ranks, rank, num_tokens * spec.num_topk);
    std::ranges::copy(tokens.topk_weights, tables.weights);
    tables.source = take<std::int32_t>(ranks, rank, 2 * routing.num_recv_rows);
    for (std::size_t row = 0; row < routing.source.size(); ++row) {
      tables.source[2 * row] = routing.source[row].rank;
      tables.source[2 * row + 1] = routing.source[row].token;
    }
    const std::vector<std::int32_t> sent = Filler(routed, rank, tables).fill();
    for (std::size_t peer = 0; peer < sent.size(); ++peer) sent_before[peer] += sent[peer];
  }
  for (int rank = 0; rank < spec.num_ranks; ++rank) {
    RankTables& tables = routed.tables[to_size(rank)];
    tables.source_base = take<std::int32_t>(ranks, rank, spec.num_ranks + 1);
    for (int source = 0; source < spec.num_ranks; ++source) {
      tables.source_base[source] = routed.tables[to_size(source)].rank_base[rank];
    }
    tables.source_base[spec.num_ranks] = sent_before[to_size(rank)];
  }
  return routed;
}

}  // namespace ferry::emulator
