#include "emulator/node_routing.hpp"

#include <algorithm>
#include <utility>

namespace ferry::emulator {
namespace {

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

struct Counts {
  std::vector<std::int32_t> ranks;
  std::vector<std::int32_t> experts;
};

}  // namespace

plan::RouteShape NodeRouting::shape() const {
  return {.layout = world_.options.layout,
          .num_ranks = world_.ranks.size(),
          .num_experts = to_size(world_.options.num_experts),
          .num_topk = static_cast<std::size_t>(world_.num_topk),
          .expert_alignment = world_.options.expert_alignment,
          .slab_capacity = world_.options.slab_capacity,
          .expert_to_rank = owners_};
}

NodeRouting::NodeRouting(NodeRanks& ranks, oracle::World world)
    : world_(std::move(world)), routings_(oracle::route(world_).value()), owners_(oracle::expert_owners(world_)) {
  const plan::RouteShape shape = this->shape();
  const std::size_t num_ranks = shape.num_ranks;
  std::vector<Counts> counts(num_ranks);
  std::vector<plan::SourceCounts> sources;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    counts[rank] = {std::vector<std::int32_t>(num_ranks), std::vector<std::int32_t>(shape.num_experts)};
    const std::vector<std::int64_t>& ids = world_.ranks[rank].topk_idx;
    plan::count_tokens(shape, ids, counts[rank].ranks.data(), counts[rank].experts.data());
    sources.push_back(
        {counts[rank].ranks.data(), counts[rank].experts.data(), static_cast<std::int64_t>(ids.size()), 0});
  }
  local_expert_.resize(owners_.size());
  for (const oracle::RankRouting& routing : routings_) {
    for (std::size_t i = 0; i < routing.local_expert_ids.size(); ++i) {
      local_expert_[to_size(routing.local_expert_ids[i])] = static_cast<std::int32_t>(i);
    }
  }
  ranks_.resize(num_ranks);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    Rank& one = ranks_[rank];
    one.topology = ranks.topology(static_cast<int>(rank));
    one.route.groups = plan::group_experts(shape, sources);
    plan::plan_rows(shape, sources, rank, world_.ranks[rank].topk_idx, one.route);
    one.route.outgoing = plan::build_forward_tables(one.route.tokens, one.topology);
    one.experts = cuda::local_experts(shape, one.route, rank);
  }
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    Rank& one = ranks_[rank];
    const Topology& topology = one.topology;
    const int node = topology.node_of(topology.rank);
    for (std::size_t source = 0; source < num_ranks; ++source) {
      const plan::ForwardTable& table = ranks_[source].route.outgoing[to_size(node)];
      one.route.num_items_from_rank.push_back(static_cast<std::int32_t>(table.num_items()));
    }
    one.route.incoming.resize(to_size(topology.num_nodes()));
    for (int from = 0; from < topology.num_nodes(); ++from) {
      if (from == node) continue;
      const int peer = from * topology.ranks_per_node + topology.rail_of(topology.rank);
      one.route.incoming[to_size(from)] = ranks_[to_size(peer)].route.outgoing[to_size(node)];
    }
    plan::for_each_received_run(
        shape, sources, one.route.groups, rank,
        [&](std::size_t /*run*/, std::size_t source, std::int64_t first_row, std::int32_t num_rows) {
          for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
            one.route.source_table[to_size(row) * 2] = static_cast<std::int32_t>(source);
          }
        });
    one.route.item_of_row.assign(to_size(one.route.num_used_rows), 0);
    for (std::size_t source = 0; source < num_ranks; ++source) {
      const Status entered = plan::enter_table(ranks_[source].route.outgoing[to_size(node)], static_cast<int>(source),
                                               topology.rail_of(topology.rank), one.route.num_rows_from_rank[source],
                                               {one.route.source_table, one.route.item_of_row});
      if (!entered.ok()) std::abort();
    }
    const cuda::NodeTablesInput input{.topology = topology,
                                      .shape = shape,
                                      .route = one.route,
                                      .experts = one.experts,
                                      .ids = world_.ranks[rank].topk_idx,
                                      .num_rows = routings_[rank].num_recv_rows,
                                      .weights = !world_.ranks[rank].topk_weights.empty()};
    one.shape = cuda::shape_of(input);
    one.memory = DeviceMemory(cuda::NodeTables::at(nullptr, one.shape).size_bytes);
    one.tables = cuda::NodeTables::at(one.memory.data(), one.shape);
    cuda::fill(input, one.memory.data());
    std::ranges::copy(world_.ranks[rank].topk_weights, one.tables.weights);
  }
}

cuda::RoutedTokens NodeRouting::routed(int rank) const {
  const Rank& one = ranks_[to_size(rank)];
  return {.tables = one.tables,
          .num_tokens = num_tokens(rank),
          .num_topk = world_.num_topk,
          .num_items_back = static_cast<std::int64_t>(one.shape.num_items_back),
          .num_items_in = static_cast<std::int64_t>(one.shape.num_items_in),
          .num_used_rows = one.route.num_used_rows,
          .by_token = world_.options.layout == Layout::kTokens,
          .num_experts = static_cast<int>(world_.options.num_experts),
          .owner = owners_.data(),
          .local_expert = local_expert_.data()};
}

}  // namespace ferry::emulator
