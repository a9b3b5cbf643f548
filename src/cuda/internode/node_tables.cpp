#include "cuda/internode/node_tables.hpp"

#include <algorithm>
#include <span>

#include "plan/carver.hpp"
#include "plan/to_size.hpp"

namespace ferry::cuda {
namespace {

using plan::ForwardTable;

/// Table of the items from `node`; the items of its own node are this rank's tokens.
const ForwardTable& incoming(const NodeTablesInput& input, int node) {
  const bool own = node == input.topology.node_of(input.topology.rank);
  return own ? input.route.outgoing[to_size(node)] : input.route.incoming[to_size(node)];
}

void fill_flows(const NodeTablesInput& input, const NodeTables& tables) {
  const int my_node = input.topology.node_of(input.topology.rank);
  std::int32_t first_out = 0;
  std::int32_t first_in = 0;
  std::int32_t first_back = 0;
  for (int node = 0; node < input.topology.num_nodes(); ++node) {
    const auto num_out = static_cast<std::int32_t>(input.route.outgoing[to_size(node)].num_items());
    const auto num_in = static_cast<std::int32_t>(incoming(input, node).num_items());
    tables.to_nodes[node] = {first_out, num_out, first_in, num_in};
    // Items that stay in the node are summed in place.
    tables.from_nodes[node] = node == my_node ? ItemFlow{} : ItemFlow{first_in, num_in, first_back, num_out};
    if (node != my_node) first_back += num_out;
    first_out += num_out;
    first_in += num_in;
  }
}

void fill_outgoing(const NodeTablesInput& input, const NodeTables& tables) {
  const int my_node = input.topology.node_of(input.topology.rank);
  const std::size_t num_tokens = input.ids.size() / input.shape.num_topk;
  std::fill_n(tables.item_of_token, to_size(input.topology.num_nodes()) * num_tokens, -1);
  for (int node = 0; node < input.topology.num_nodes(); ++node) {
    const ItemFlow& flow = tables.to_nodes[node];
    const std::int32_t first_sum = node == my_node ? flow.first_in : tables.from_nodes[node].first_in;
    std::int32_t item = 0;
    for (const std::int32_t token : input.route.outgoing[to_size(node)].tokens) {
      tables.out_tokens[flow.first_out + item] = token;
      tables.item_of_token[to_size(node) * num_tokens + to_size(token)] = first_sum + item;
      ++item;
    }
  }
}

/// Fills the K places of one token.
void fill_token(std::span<const plan::Destination> destinations, std::span<Destination> places) {
  std::int16_t rank_before = -1;
  for (std::size_t i = 0; i < places.size(); ++i) {
    Destination& place = places[i];
    place = Destination{};
    place.rank = -1;
    if (i >= destinations.size()) continue;
    const plan::Destination& destination = destinations[i];
    place.row = destination.row;
    place.rank = destination.rank;
    place.topk = destination.topk;
    if (destination.first != 0) place.flags |= kFirstOfRow;
    if (destination.rank != rank_before) place.flags |= kFirstOfRank;
    rank_before = destination.rank;
  }
}

void fill_destinations(const NodeTablesInput& input, const NodeTables& tables) {
  Destination* next = tables.destinations;
  for (int node = 0; node < input.topology.num_nodes(); ++node) {
    const ForwardTable& table = incoming(input, node);
    for (std::int64_t item = 0; item < table.num_items(); ++item, next += input.shape.num_topk) {
      fill_token(table.destinations_of(item), {next, input.shape.num_topk});
    }
  }
}

void fill_channels(const NodeTablesInput& input, const NodeTables& tables) {
  const plan::NodeRoute& route = input.route;
  const std::size_t num_ranks = to_size(input.topology.num_ranks);
  const std::size_t num_topk = input.shape.num_topk;
  std::vector<std::int32_t> num_sent(num_ranks, 0);
  for (std::size_t token = 0; token < input.ids.size() / num_topk; ++token) {
    const auto begin = to_size(route.tokens.first_destination[token]);
    const auto end = to_size(route.tokens.first_destination[token + 1]);
    const std::span<Destination> places(tables.token_destinations + token * num_topk, num_topk);
    fill_token({route.tokens.destinations.data() + begin, end - begin}, places);
    for (Destination& place : places.first(end - begin)) {
      std::int32_t& count = num_sent[static_cast<std::size_t>(place.rank)];
      if ((place.flags & kFirstOfRank) != 0) ++count;
      place.token_row = count - 1;
    }
  }
  std::fill_n(tables.rank_base, num_ranks, 0);
  tables.source_base[0] = 0;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    tables.source_base[rank + 1] = tables.source_base[rank] + static_cast<std::int32_t>(route.num_rows_from_rank[rank]);
  }
  std::ranges::copy(route.rank_counts, tables.rank_counts);
  std::ranges::copy(route.num_tokens_of_rank, tables.tokens_of_rank);
}

/// [R] position of the first item that each rank sends to this node, on the forwarder of its rail.
std::vector<std::int32_t> first_items(const NodeTablesInput& input) {
  const Topology& topology = input.topology;
  std::vector<std::int32_t> first(to_size(topology.num_ranks));
  for (int rail = 0; rail < topology.ranks_per_node; ++rail) {
    std::int32_t next = 0;
    for (int node = 0; node < topology.num_nodes(); ++node) {
      const std::size_t rank = to_size(node * topology.ranks_per_node + rail);
      first[rank] = next;
      next += input.route.num_items_from_rank[rank];
    }
  }
  return first;
}

void fill_rows(const NodeTablesInput& input, const NodeTables& tables) {
  const plan::NodeRoute& route = input.route;
  const std::vector<std::int32_t> first = first_items(input);
  std::fill_n(tables.source, to_size(input.num_rows) * 2, -1);
  std::copy(route.source_table.begin(), route.source_table.end(), tables.source);
  for (std::size_t row = 0; row < to_size(route.num_used_rows); ++row) {
    const std::int32_t source = route.source_table[2 * row];
    tables.row_items[row] = {-1, -1};
    if (source < 0) continue;
    tables.row_items[row] = {input.topology.rail_of(source), first[to_size(source)] + route.item_of_row[row]};
  }
  if (input.shape.by_rank()) return;
  std::fill_n(tables.row_experts, to_size(route.num_used_rows), -1);
  for (std::size_t local = 0; local < input.experts.ids.size(); ++local) {
    std::fill_n(tables.row_experts + input.experts.row_offsets[local], input.experts.num_rows[local],
                input.experts.ids[local]);
  }
}

}  // namespace

NodeTables NodeTables::at(std::byte* base, const Shape& shape) {
  plan::Carver carver(base);
  NodeTables tables;
  tables.summary = carver.take<RouteSummary>(1);
  tables.to_nodes = carver.take<ItemFlow>(shape.num_nodes);
  tables.from_nodes = carver.take<ItemFlow>(shape.num_nodes);
  tables.out_tokens = carver.take<std::int32_t>(shape.num_items_out);
  tables.destinations = carver.take<Destination>(shape.num_items_in * shape.num_topk);
  tables.item_of_token = carver.take<std::int32_t>(shape.num_nodes * shape.num_tokens);
  tables.row_items = carver.take<RowItem>(shape.num_used_rows);
  tables.row_experts = carver.take<std::int32_t>(shape.by_token ? 0 : shape.num_used_rows);
  tables.source = carver.take<std::int32_t>(2 * shape.num_rows);
  tables.slots = carver.take<std::int32_t>(shape.num_tokens * shape.num_topk);
  tables.token_destinations = carver.take<Destination>(shape.num_tokens * shape.num_topk);
  tables.ids = carver.take<std::int64_t>(shape.num_tokens * shape.num_topk);
  tables.rows_per_expert = carver.take<std::int32_t>(shape.num_local_experts);
  tables.row_offsets = carver.take<std::int64_t>(shape.num_local_experts + 1);
  tables.expert_rows = carver.take<std::int64_t>(shape.num_experts);
  tables.own_counts = carver.take<std::int32_t>(shape.num_experts);
  tables.rank_base = carver.take<std::int32_t>(shape.num_ranks);
  tables.source_base = carver.take<std::int32_t>(shape.num_ranks + 1);
  tables.rank_counts = carver.take<std::int32_t>(shape.num_ranks * shape.num_ranks);
  tables.tokens_of_rank = carver.take<std::int64_t>(shape.num_ranks);
  tables.host_bytes = carver.used_bytes();
  tables.weights = carver.take<float>(shape.weights ? shape.num_tokens * shape.num_topk : 0);
  tables.size_bytes = carver.used_bytes();
  return tables;
}

LocalExperts local_experts(const plan::RouteShape& shape, const plan::NodeRoute& route, std::size_t rank) {
  LocalExperts experts;
  for (std::size_t expert = 0; expert < shape.num_experts; ++expert) {
    if (shape.owner(expert) != rank) continue;
    experts.ids.push_back(static_cast<std::int32_t>(expert));
    experts.num_rows.push_back(static_cast<std::int32_t>(route.groups.num_rows[expert]));
    if (!shape.by_rank()) experts.row_offsets.push_back(route.groups.first_rows[expert]);
  }
  if (!shape.by_rank()) experts.row_offsets.push_back(route.num_used_rows);
  return experts;
}

NodeTables::Shape shape_of(const NodeTablesInput& input) {
  NodeTables::Shape shape;
  shape.num_ranks = to_size(input.topology.num_ranks);
  shape.num_nodes = to_size(input.topology.num_nodes());
  shape.num_topk = input.shape.num_topk;
  shape.num_tokens = input.ids.size() / shape.num_topk;
  shape.num_experts = input.shape.num_experts;
  shape.num_local_experts = input.experts.ids.size();
  const int my_node = input.topology.node_of(input.topology.rank);
  for (int node = 0; node < input.topology.num_nodes(); ++node) {
    const std::size_t num_out = to_size(input.route.outgoing[to_size(node)].num_items());
    shape.num_items_out += num_out;
    if (node != my_node) shape.num_items_back += num_out;
    shape.num_items_in += to_size(incoming(input, node).num_items());
  }
  shape.num_rows = to_size(input.num_rows);
  shape.num_used_rows = to_size(input.route.num_used_rows);
  shape.by_token = input.shape.by_rank();
  shape.weights = input.weights;
  return shape;
}

void fill(const NodeTablesInput& input, std::byte* base) {
  const NodeTables tables = NodeTables::at(base, shape_of(input));
  *tables.summary = {};
  tables.summary->valid = 1;
  tables.summary->num_used_rows = static_cast<std::int32_t>(input.route.num_used_rows);
  fill_flows(input, tables);
  fill_outgoing(input, tables);
  fill_destinations(input, tables);
  fill_rows(input, tables);
  fill_channels(input, tables);
  std::ranges::copy(input.route.tokens.slots, tables.slots);
  std::ranges::copy(input.ids, tables.ids);
  std::ranges::copy(input.experts.num_rows, tables.rows_per_expert);
  std::ranges::copy(input.experts.row_offsets, tables.row_offsets);
  std::ranges::copy(input.route.groups.num_rows, tables.expert_rows);
  std::ranges::copy(input.route.own_expert_counts, tables.own_counts);
}

}  // namespace ferry::cuda
