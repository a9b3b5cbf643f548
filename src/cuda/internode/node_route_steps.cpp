#include "cuda/internode/node_route_steps.hpp"

#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

IdsBlocks blocks_of(const NodeRouteInput& input) { return {input.max_tokens, input.num_topk}; }

/// Nodes have agreed on the call before its later kernels begin: the entries of these only report that memory is ready.
constexpr std::uint64_t kAgreed = 1;

}  // namespace

NodeTables::Shape bounded_tables(const Topology& topology, const NodeRouteInput& input, std::int64_t num_rows,
                                 bool weights) {
  const auto num_nodes = to_size(topology.num_nodes());
  NodeTables::Shape shape;
  shape.num_ranks = to_size(topology.num_ranks);
  shape.num_nodes = num_nodes;
  shape.num_tokens = to_size(input.num_tokens);
  shape.num_topk = static_cast<std::size_t>(input.num_topk);
  shape.num_experts = to_size(input.num_experts);
  shape.num_local_experts = to_size(input.num_local_experts);
  shape.num_items_out = num_nodes * to_size(input.num_tokens);
  shape.num_items_back = (num_nodes - 1) * to_size(input.num_tokens);
  shape.num_items_in = num_nodes * to_size(input.max_tokens);
  shape.num_rows = to_size(num_rows);
  shape.num_used_rows = to_size(num_rows);
  shape.by_token = input.layout == Layout::kTokens;
  shape.weights = weights;
  return shape;
}

RoutedTokens bounded_tokens(const Topology& topology, const NodeRouteInput& input, std::int64_t num_rows) {
  RoutedTokens routed;
  routed.tables = input.tables;
  routed.num_tokens = input.num_tokens;
  routed.num_topk = input.num_topk;
  routed.num_items_back = (topology.num_nodes() - 1) * input.num_tokens;
  routed.num_items_in = topology.num_nodes() * input.max_tokens;
  routed.num_used_rows = num_rows;
  routed.by_token = input.layout == Layout::kTokens;
  routed.num_experts = input.num_experts;
  routed.owner = input.placement.owner;
  routed.local_expert = input.placement.local_expert;
  routed.by_kernels = true;
  return routed;
}

NodeRouteStaging NodeRouteStaging::at(std::byte* base, const Topology& topology, const NodeRouteInput& input) {
  const auto block_bytes = to_size(blocks_of(input).block_bytes());
  const auto num_ranks = to_size(topology.num_ranks);
  const auto num_nodes = to_size(topology.num_nodes());
  const bool by_token = input.layout == Layout::kTokens;
  const std::size_t num_runs = by_token ? num_ranks : to_size(input.num_experts);
  const std::size_t num_tokens = num_ranks * to_size(input.max_tokens);
  plan::Carver carver(base);
  NodeRouteStaging staging;
  staging.own = carver.take<std::byte>(block_bytes);
  staging.rail = carver.take<std::byte>(num_nodes * block_bytes);
  staging.all = carver.take<std::byte>(num_ranks * block_bytes);
  staging.flows = carver.take<ItemFlow>(num_nodes);
  NodeRouteScratch& scratch = staging.scratch;
  scratch.positions = carver.take<std::int32_t>(num_tokens * to_size(input.num_topk));
  scratch.run_counts = carver.take<std::int32_t>(num_runs * num_ranks);
  scratch.run_first = carver.take<std::int32_t>(num_runs * num_ranks);
  scratch.expert_counts = carver.take<std::int32_t>(by_token ? to_size(input.num_local_experts) * num_ranks : 0);
  scratch.own_counts = carver.take<std::int32_t>(by_token ? to_size(input.num_experts) : 0);
  scratch.node_items = carver.take<std::int32_t>(num_tokens);
  scratch.items_in = carver.take<std::int32_t>(num_ranks);
  scratch.items_out = carver.take<std::int32_t>(num_nodes);
  staging.size_bytes = carver.used_bytes();
  return staging;
}

NodeRouteSteps node_route_steps(const NodePlace& place, const Topology& topology, const CallIdentity& call,
                                const NodeRouteInput& input, const NodeRouteStaging& staging,
                                const StepBlocks& blocks) {
  const IdsBlocks ids_blocks = blocks_of(input);
  const RouteSummary* const gate = &place.rails.state->gate;
  NodeRouteSteps steps;
  steps.homes = input.homes;
  IdsParams& ids = steps.ids;
  ids.blocks = ids_blocks;
  ids.topk_idx = input.topk_idx;
  ids.wide_ids = input.wide_ids;
  ids.num_tokens_view = input.num_tokens_view;
  ids.num_tokens = input.num_tokens;
  ids.num_experts = input.num_experts;
  ids.placement = input.placement;
  ids.group_rank = place.group_rank;
  ids.max_recv_rows = input.max_recv_rows;
  ids.node = place.rails.node;
  ids.num_nodes = place.rails.num_nodes;
  ids.own = staging.own;
  ids.ids = input.tables.ids;
  ids.weights_in = input.weights;
  ids.weights = input.tables.weights;
  ids.flows = staging.flows;

  ExchangeParams& exchange = steps.exchange;
  exchange = agreement_only(place, call);
  exchange.flows = staging.flows;
  exchange.row = {staging.own, IdsBlocks::kItemBytes, staging.rail, IdsBlocks::kItemBytes, IdsBlocks::kItemBytes};
  exchange.num_own_blocks = 1;
  exchange.chunk_items = blocks.chunk_items;

  GatherParams& gather = steps.gather;
  gather.ranks = place.ranks;
  gather.entry.agreement = kAgreed;
  gather.entry.record_number = call.record_number;
  gather.entry.rows_offset = staging.rail - place.ranks.peer_bases[place.ranks.rank];
  gather.entry.num_blocks = blocks.num_other;
  gather.gate = gate;
  gather.num_nodes = place.rails.num_nodes;
  gather.block_bytes = ids_blocks.block_bytes();
  gather.all = staging.all;
  gather.num_blocks = blocks.num_other;

  NodeRouteParams& route = steps.route;
  route.ranks = place.ranks;
  route.rails = place.rails.state;
  route.group_rank = place.group_rank;
  route.num_ranks = topology.num_ranks;
  route.ranks_per_node = place.ranks_per_node;
  route.blocks = ids_blocks;
  route.all = staging.all;
  route.num_tokens = input.num_tokens;
  route.num_topk = input.num_topk;
  route.num_experts = input.num_experts;
  route.num_local_experts = input.num_local_experts;
  route.layout = input.layout;
  route.expert_alignment = input.expert_alignment;
  route.slab_capacity = input.slab_capacity;
  route.placement = input.placement;
  route.counters = input.counters;
  route.scratch = staging.scratch;
  route.tables = input.tables;
  route.host = input.host;
  route.num_blocks = blocks.num_all;

  return steps;
}

cudaError_t launch(const NodeRouteSteps& steps, cudaStream_t stream) {
  cudaError_t error = steps.homes.ranges != nullptr ? launch_homes(steps.homes, stream) : cudaSuccess;
  if (error == cudaSuccess) error = launch_ids(steps.ids, stream);
  if (error == cudaSuccess) error = launch_rail_exchange(steps.exchange, stream);
  if (error == cudaSuccess) error = launch_gather(steps.gather, stream);
  if (error == cudaSuccess) error = launch_node_route(steps.route, stream);
  return error;
}

}  // namespace ferry::cuda
