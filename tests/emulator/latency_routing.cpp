#include "emulator/latency_routing.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace

test::WorldSpec draw_latency_world(std::mt19937_64& random) {
  constexpr int kRanks[] = {1, 2, 3, 4, 8};
  constexpr test::RoutingPattern kPatterns[] = {test::RoutingPattern::kRandom,     test::RoutingPattern::kRandom,
                                                test::RoutingPattern::kDuplicates, test::RoutingPattern::kZipf,
                                                test::RoutingPattern::kOneHot,     test::RoutingPattern::kNone};
  constexpr test::TokenCounts kCounts[] = {test::TokenCounts::kEven, test::TokenCounts::kUneven,
                                           test::TokenCounts::kSomeZero, test::TokenCounts::kAllZero};
  test::WorldSpec spec;
  spec.num_ranks = kRanks[random() % std::size(kRanks)];
  spec.num_topk = 1 + static_cast<int>(random() % (random() % 6 == 0 ? 32 : 8));
  spec.num_experts = 1 + static_cast<std::int64_t>(random() % 24);
  spec.max_tokens = 1 + static_cast<std::int64_t>(random() % 9);
  spec.pattern = kPatterns[random() % std::size(kPatterns)];
  spec.counts = kCounts[random() % (random() % 8 == 0 ? 4 : 3)];
  spec.layout = Layout::kSlab;
  spec.spare_slab_rows = static_cast<std::int64_t>(random() % 3);
  spec.custom_placement = random() % 2 == 0;
  spec.seed = random();
  return spec;
}

oracle::World LatencyRouting::counted(oracle::World world) const {
  for (std::size_t rank = 0; rank < counts_.size(); ++rank) {
    oracle::RankTokens& tokens = world.ranks[rank];
    const std::int64_t num_counted = std::clamp<std::int64_t>(counts_[rank], 0, tokens.num_tokens);
    std::fill(tokens.topk_idx.begin() + num_counted * world.num_topk, tokens.topk_idx.end(), -1);
  }
  return world;
}

LatencyRouting::LatencyRouting(LatencyRanks& ranks, oracle::World world, std::int64_t max_tokens,
                               std::vector<std::int32_t> counts, std::vector<int> masked)
    : counts_(std::move(counts)),
      masked_(std::move(masked)),
      given_(counted(std::move(world))),
      world_(oracle::physical_world(given_, masked_)),
      left_(oracle::without_ranks(world_, masked_)),
      routings_(oracle::route(left_).value()),
      owners_(oracle::expert_owners(world_)),
      max_tokens_(max_tokens) {
  for (const oracle::RankTokens& tokens : world_.ranks) has_weights_ = has_weights_ || !tokens.topk_weights.empty();
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    const cuda::LatencyTables::Shape shape = shape_of(rank);
    memory_.emplace_back(cuda::LatencyTables::at(nullptr, shape).size_bytes);
    tables_.push_back(cuda::LatencyTables::at(memory_.back().data(), shape));
    *tables_.back().summary = {};
    *tables_.back().dispatch = {};
    *tables_.back().combine = {};
  }
}

bool LatencyRouting::is_masked(int rank) const { return std::ranges::find(masked_, rank) != masked_.end(); }

bool LatencyRouting::is_lost(int rank) const {
  return is_masked(rank) || std::ranges::find(masked_later_, rank) != masked_later_.end();
}

cuda::LatencyTables::Shape LatencyRouting::shape_of(int rank) const {
  return {.num_ranks = world_.ranks.size(),
          .num_tokens = to_size(num_tokens(rank)),
          .max_tokens = to_size(max_tokens_),
          .num_topk = static_cast<std::size_t>(world_.num_topk),
          .num_local_experts = to_size(num_local_experts(rank)),
          .num_slab_rows = to_size(num_rows(rank)),
          .weights = has_weights_};
}

cuda::LatencyParams LatencyRouting::params(LatencyRanks& ranks, int rank) const {
  cuda::LatencyParams params;
  params.ranks = ranks.params(rank);
  params.layout = ranks.layout();
  params.num_tokens = num_tokens(rank);
  params.max_tokens = max_tokens_;
  params.num_topk = world_.num_topk;
  params.num_experts = static_cast<int>(world_.options.num_experts);
  params.num_local_experts = static_cast<int>(num_local_experts(rank));
  params.slab_capacity = world_.options.slab_capacity;
  params.tables = tables(rank);
  params.counts_waits = ranks.counts_waits();
  return params;
}

std::int32_t LatencyRouting::local_index(std::int64_t expert) const {
  const auto& ids = routings_[static_cast<std::size_t>(owners_[to_size(expert)])].local_expert_ids;
  return static_cast<std::int32_t>(std::find(ids.begin(), ids.end(), expert) - ids.begin());
}

void LatencyRouting::fill_tokens(int rank, const cuda::LatencyTables& tables) const {
  const oracle::RankTokens& tokens = world_.ranks[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < tokens.topk_idx.size(); ++i) {
    const std::int64_t expert = tokens.topk_idx[i];
    tables.ids[i] = expert;
    tables.homes[i] = expert < 0 ? -1 : cuda::home_of(owners_[to_size(expert)], local_index(expert));
    if (expert >= 0 && is_lost(owners_[to_size(expert)])) tables.homes[i] = cuda::lost_home(tables.homes[i]);
    tables.slots[i] = routings_[static_cast<std::size_t>(rank)].slots[i];
    if (tables.weights != nullptr) tables.weights[i] = tokens.topk_weights[i];
  }
}

void LatencyRouting::fill_rows(int rank, const cuda::LatencyTables& tables) const {
  const oracle::RankRouting& routing = routings_[static_cast<std::size_t>(rank)];
  std::copy(routing.num_rows_per_local_expert.begin(), routing.num_rows_per_local_expert.end(), tables.rows_per_expert);
  std::copy(routing.expert_row_offsets.begin(), routing.expert_row_offsets.end(), tables.row_offsets);
  const std::vector<oracle::SourceRange> ranges = oracle::source_ranges(left_, routing);
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    tables.source_ranges[2 * i] = ranges[i].num_rows;
    tables.source_ranges[2 * i + 1] = ranges[i].first;
  }
  for (std::size_t row = 0; row < routing.source.size(); ++row) {
    tables.source[2 * row] = routing.source[row].rank;
    tables.source[2 * row + 1] = routing.source[row].token;
  }
  for (std::size_t source = 0; source < world_.ranks.size(); ++source) {
    tables.tokens_of_rank[source] = static_cast<std::int32_t>(num_received(static_cast<int>(source)));
    *tables.most_tokens = std::max(source == 0 ? 0 : *tables.most_tokens, tables.tokens_of_rank[source]);
  }
}

void LatencyRouting::fill_items(int rank, const cuda::LatencyTables& tables) const {
  const auto num_topk = static_cast<std::size_t>(world_.num_topk);
  for (std::size_t source = 0; source < world_.ranks.size(); ++source) {
    const oracle::RankTokens& tokens = world_.ranks[source];
    const std::int64_t num_tokens = is_masked(static_cast<int>(source)) ? 0 : tokens.num_tokens;
    for (std::size_t token = 0; token < to_size(num_tokens); ++token) {
      const std::size_t item = source * to_size(max_tokens_) + token;
      std::set<std::int32_t> ranks_of_token;
      for (std::size_t k = 0; k < num_topk; ++k) {
        const std::size_t entry = token * num_topk + k;
        const std::int64_t expert = tokens.topk_idx[entry];
        const bool here = expert >= 0 && owners_[to_size(expert)] == rank;
        if (expert >= 0) ranks_of_token.insert(owners_[to_size(expert)]);
        tables.items[item * num_topk + k] = here ? routings_[source].slots[entry] : -1;
        if (here && tables.item_weights != nullptr) {
          tables.item_weights[item * num_topk + k] = tokens.topk_weights[entry];
        }
      }
      const auto own = ranks_of_token.find(rank);
      tables.rank_ordinals[item] =
          own == ranks_of_token.end() ? -1 : static_cast<std::int32_t>(std::distance(ranks_of_token.begin(), own));
    }
  }
}

void LatencyRouting::fill(int rank) const {
  const cuda::LatencyTables& own = tables(rank);
  fill_tokens(rank, own);
  fill_rows(rank, own);
  fill_items(rank, own);
  own.summary->valid = 1;
}

std::string LatencyRouting::compare(int rank) const {
  const cuda::LatencyTables::Shape shape = shape_of(rank);
  const cuda::LatencyTables& own = tables(rank);
  // Memory that must not be written keeps its pattern.
  const DeviceMemory memory(memory_[static_cast<std::size_t>(rank)].size());
  const cuda::LatencyTables expected = cuda::LatencyTables::at(memory.data(), shape);
  *expected.summary = {};
  fill_tokens(rank, expected);
  fill_rows(rank, expected);
  fill_items(rank, expected);

  const std::size_t num_entries = shape.num_tokens * shape.num_topk;
  const auto equal = [](const auto* a, const auto* b, std::size_t count) { return std::equal(a, a + count, b); };
  if (own.summary->valid != 1) return "summary.valid";
  if (!equal(own.ids, expected.ids, num_entries)) return "ids";
  if (own.weights != nullptr && std::memcmp(own.weights, expected.weights, num_entries * sizeof(float)) != 0) {
    return "weights";
  }
  if (!equal(own.homes, expected.homes, num_entries)) return "homes";
  if (!equal(own.slots, expected.slots, num_entries)) return "slots";
  if (!equal(own.rows_per_expert, expected.rows_per_expert, shape.num_local_experts)) return "rows_per_expert";
  if (!equal(own.row_offsets, expected.row_offsets, shape.num_local_experts + 1)) return "row_offsets";
  if (!equal(own.source_ranges, expected.source_ranges, shape.num_local_experts * shape.num_ranks * 2)) {
    return "source_ranges";
  }
  if (!equal(own.source, expected.source, shape.num_slab_rows * 2)) return "source";
  if (!equal(own.tokens_of_rank, expected.tokens_of_rank, shape.num_ranks)) return "tokens_of_rank";
  if (*own.most_tokens != *expected.most_tokens) return "most_tokens";
  for (std::size_t source = 0; source < shape.num_ranks; ++source) {
    const std::size_t first = source * shape.max_tokens;
    const auto count = to_size(num_received(static_cast<int>(source)));
    if (!equal(own.rank_ordinals + first, expected.rank_ordinals + first, count)) return "rank_ordinals";
    for (std::size_t i = first * shape.num_topk; i < (first + count) * shape.num_topk; ++i) {
      if (own.items[i] != expected.items[i]) return "items";
      if (own.item_weights != nullptr && own.items[i] >= 0 &&
          std::memcmp(own.item_weights + i, expected.item_weights + i, sizeof(float)) != 0) {
        return "item_weights";
      }
    }
  }
  return memory_[static_cast<std::size_t>(rank)].is_guarded() ? "" : "a write after the tables";
}

}  // namespace ferry::emulator
