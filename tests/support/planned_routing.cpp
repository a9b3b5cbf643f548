#include "support/planned_routing.hpp"

#include "plan/route_plan.hpp"

namespace ferry::test {
namespace {

/// Counts and lists that one rank would publish.
struct Published {
  std::vector<std::int32_t> rank_counts;
  std::vector<std::int32_t> expert_counts;
  std::vector<std::int32_t> tokens;
};

Published publish(const plan::RouteShape& shape, const oracle::RankTokens& tokens) {
  Published published;
  published.rank_counts.resize(shape.num_ranks);
  published.expert_counts.resize(shape.num_experts);
  published.tokens.resize(tokens.topk_idx.size());
  plan::count_tokens(shape, tokens.topk_idx, published.rank_counts.data(), published.expert_counts.data());
  const std::vector<std::int32_t>& runs = shape.by_rank() ? published.rank_counts : published.expert_counts;
  plan::list_run_tokens(shape, tokens.topk_idx, runs.data(), published.tokens.data());
  return published;
}

}  // namespace

std::vector<oracle::RankRouting> planned_routings(const oracle::World& world) {
  const std::vector<std::int32_t> owners = oracle::expert_owners(world);
  const plan::RouteShape shape{.layout = world.options.layout,
                               .num_ranks = to_size(world.num_ranks),
                               .num_experts = to_size(world.options.num_experts),
                               .num_topk = to_size(world.num_topk),
                               .expert_alignment = world.options.expert_alignment,
                               .slab_capacity = world.options.slab_capacity,
                               .expert_to_rank = owners};
  std::vector<Published> published;
  for (const oracle::RankTokens& tokens : world.ranks) published.push_back(publish(shape, tokens));
  std::vector<plan::SourceCounts> sources;
  for (std::size_t rank = 0; rank < shape.num_ranks; ++rank) {
    sources.push_back({published[rank].rank_counts.data(), published[rank].expert_counts.data(),
                       static_cast<std::int64_t>(world.ranks[rank].topk_idx.size()),
                       world.max_recv_rows.empty() ? 0 : world.max_recv_rows[rank]});
  }
  const plan::ExpertGroups groups = plan::group_experts(shape, sources);
  throw_if_error(plan::check_capacity(shape, sources, groups));

  std::vector<oracle::RankRouting> routings;
  for (std::size_t rank = 0; rank < shape.num_ranks; ++rank) {
    oracle::RankRouting routing;
    const plan::TokenPlan tokens = plan::place_tokens(shape, sources, groups, rank, world.ranks[rank].topk_idx);
    routing.slots = tokens.slots;
    routing.num_rows_to_rank = tokens.num_rows_to_rank;
    routing.num_used_rows = plan::rows_on_rank(shape, sources, groups, rank);
    routing.num_recv_rows = sources[rank].max_recv_rows > 0 ? sources[rank].max_recv_rows : routing.num_used_rows;
    for (const plan::SourceCounts& source : sources) {
      routing.num_rows_from_rank.push_back(plan::rows_from_source(shape, source, rank));
    }
    for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
      if (shape.owner(expert) != rank) continue;
      routing.local_expert_ids.push_back(static_cast<std::int32_t>(expert));
      routing.num_rows_per_local_expert.push_back(static_cast<std::int32_t>(groups.num_rows[expert]));
      if (!shape.by_rank()) routing.expert_row_offsets.push_back(groups.first_rows[expert]);
    }
    if (!shape.by_rank()) routing.expert_row_offsets.push_back(routing.num_used_rows);
    routing.source.resize(to_size(routing.num_used_rows));
    plan::for_each_received_run(
        shape, sources, groups, rank,
        [&](std::size_t run, std::size_t source, std::int64_t first_row, std::int32_t num_rows) {
          const std::int32_t* const counts = sources[source].of_runs(shape);
          const std::int32_t* next = published[source].tokens.data();
          for (std::size_t before = 0; before < run; ++before) next += counts[before];
          for (std::int64_t row = first_row; row < first_row + num_rows; ++row, ++next) {
            routing.source[to_size(row)] = {static_cast<std::int32_t>(source), *next};
          }
        });
    routings.push_back(std::move(routing));
  }
  return routings;
}

}  // namespace ferry::test
