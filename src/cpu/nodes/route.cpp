#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "cpu/nodes/nodes_routing.hpp"
#include "cpu/nodes/operations.hpp"
#include "cpu/nodes/peer_tables.hpp"
#include "cpu/router.hpp"
#include "plan/to_size.hpp"

/// Route over several nodes, in two exchanges, each over the rails first and then inside the nodes:
///   1. counts: every rank learns what every rank sends to every rank and expert, and so fixes its own slots;
///   2. tables of hops: every rank tells its rail peers which of its tokens come to their nodes and where they go.
/// No rank sends to more ranks than there are nodes, and every number crosses the network once per node.

namespace ferry::cpu::nodes {
namespace {

using hop::Flow;
using hop::HopTable;
using hop::HopTableSize;
using node::Phase;
using node::Ticket;

class NodesRouter {
 public:
  NodesRouter(const RouteCall& call, const Means& means)
      : call_(call),
        means_(means),
        topology_(means.topology()),
        state_(std::make_shared<NodesRouting>()),
        router_(call, topology_, state_) {}

  /// Count this rank's own; fills the ticket.
  Status prepare(Ticket& ticket);
  /// After all tickets are in.
  Status run();
  std::shared_ptr<RoutingState> take() { return std::move(state_); }

 private:
  int my_node() const { return means_.rails.node(); }
  int me() const { return topology_.rank; }
  std::byte* counts_from(int node) const { return counts_block_ + to_size(node) * counts_bytes_; }
  HopTableSize table_size(int source_rank, int node) const { return sizes_[to_size(source_rank)][to_size(node)]; }
  void count_tables(HopTableSize* sizes) const;
  Status bad_peer(int rank, std::string_view what) const;
  /// Sends `out(node)` to each rail peer and writes what comes from it to `in(node)`.
  struct Streams {
    std::function<std::span<const std::byte>(int node)> out;
    std::function<std::span<std::byte>(int node)> in;
    std::string waiting_for;
  };
  Status exchange(const Streams& streams);
  Status exchange_counts();
  Status read_counts();
  void build_tables();
  Status exchange_tables();
  Status read_tables();

  const RouteCall& call_;
  const Means& means_;
  const Topology& topology_;
  std::shared_ptr<NodesRouting> state_;
  Router router_;
  std::byte* counts_block_ = nullptr;  // by node, in the arena: of this rank and its rail peers
  std::size_t counts_bytes_ = 0;
  std::vector<const HopTableSize*> sizes_;  // [rank][node]
  std::byte* tables_block_ = nullptr;       // by node likewise: their tables for this node
};

/// How large the tables for each node will be. Slots are not known yet, but tokens and entries are.
void NodesRouter::count_tables(HopTableSize* sizes) const {
  std::fill_n(sizes, topology_.num_nodes(), HopTableSize());
  std::vector<std::int64_t> last_token(to_size(topology_.num_nodes()), -1);
  for (std::size_t entry = 0; entry < state_->ids.size(); ++entry) {
    const std::int64_t id = state_->ids[entry];
    if (id < 0) continue;
    const auto node = to_size(topology_.node_of(call_.expert_to_rank[to_size(id)]));
    const auto token = static_cast<std::int64_t>(entry) / call_.num_topk;
    sizes[node].num_items += last_token[node] != token ? 1 : 0;
    sizes[node].num_places += 1;
    last_token[node] = token;
  }
}

Status NodesRouter::prepare(Ticket& ticket) {
  router_.copy_inputs();
  counts_bytes_ = Counts::at(nullptr, topology_, call_.options.num_experts).wire_bytes;
  const std::size_t block_bytes = counts_bytes_ * to_size(topology_.num_nodes());
  Result<std::byte*> block = means_.staging.route_tables(block_bytes);
  if (!block.ok()) return block.status();
  counts_block_ = *block;
  const Counts mine = Counts::at(counts_from(my_node()), topology_, call_.options.num_experts);
  router_.fill_counts(mine.rank_counts, mine.expert_counts);
  count_tables(mine.tables);
  ticket.records = means_.crew.locate(counts_block_, topology_.num_nodes(), static_cast<std::int64_t>(counts_bytes_),
                                      static_cast<std::int64_t>(counts_bytes_));
  ticket.max_recv_rows = call_.options.max_recv_rows;
  ticket.num_entries = call_.num_tokens * call_.num_topk;
  return {};
}

Status NodesRouter::bad_peer(int rank, std::string_view what) const {
  return means_.crew.fail(ErrorCode::kTransport, rank,
                          fmt::format("route: rank {} {}; do all ranks run the same build?", rank, what));
}

Status NodesRouter::exchange(const Streams& streams) {
  std::vector<Flow> flows(to_size(topology_.num_nodes()));
  std::vector<std::size_t> num_written(flows.size(), 0);
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node == my_node()) continue;
    flows[to_size(node)] = {static_cast<std::int64_t>(streams.out(node).size() / kGranuleBytes),
                            static_cast<std::int64_t>(streams.in(node).size() / kGranuleBytes), kGranuleBytes,
                            kGranuleBytes};
  }
  hop::Collective::Items items;
  items.waiting_for = streams.waiting_for;
  items.write = [&](int node, std::int64_t first, std::int64_t count, std::byte* to) {
    std::memcpy(to, streams.out(node).data() + to_size(first) * kGranuleBytes, to_size(count) * kGranuleBytes);
  };
  items.use = [&](hop::RailExchange& exchange) {
    bool used = false;
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      if (node == my_node()) continue;
      const std::span<const std::byte> bytes = exchange.front(node);
      if (bytes.empty()) continue;
      std::memcpy(streams.in(node).data() + num_written[to_size(node)], bytes.data(), bytes.size());
      num_written[to_size(node)] += bytes.size();
      exchange.pop(node, static_cast<std::int64_t>(bytes.size() / kGranuleBytes));
      used = true;
    }
    return used;
  };
  return means_.collective.exchange(std::move(flows), items);
}

Status NodesRouter::exchange_counts() {
  const auto mine = std::span<const std::byte>(counts_from(my_node()), counts_bytes_);
  Status status =
      exchange({[&](int /*node*/) { return mine; },
                [&](int node) { return std::span(counts_from(node), counts_bytes_); }, "to send its counts"});
  if (!status.ok()) return status;
  means_.crew.post(Phase::kStaged);
  return means_.crew.wait(Phase::kStaged);
}

Status NodesRouter::read_counts() {
  const std::int64_t stride = static_cast<std::int64_t>(counts_bytes_);
  std::vector<const std::byte*> blocks;
  for (int mate = means_.crew.first_rank(); mate < means_.crew.end_rank(); ++mate) {
    const node::Location& location = means_.crew.ticket_of(mate).records;
    blocks.push_back(means_.crew.resolve(location, mate, {topology_.num_nodes(), stride}));
    if (blocks.back() == nullptr || location.stride_bytes != stride) {
      return bad_peer(mate, "published counts outside its arena");
    }
  }
  for (int rank = 0; rank < topology_.num_ranks; ++rank) {
    // The arena's memory, which only its owner writes, and not now.
    auto* const base =
        const_cast<std::byte*>(blocks[to_size(topology_.rail_of(rank))]) + topology_.node_of(rank) * stride;
    const Counts counts = Counts::at(base, topology_, call_.options.num_experts);
    const hop::Collective::Said& said = means_.collective.said_by(rank);
    if (Status status = check_counts(counts, topology_, call_.options.num_experts, call_.num_topk, said.num_entries);
        !status.ok()) {
      return bad_peer(rank, status.message());
    }
    (void)router_.add_source({counts.rank_counts, counts.expert_counts, said.num_entries, said.max_recv_rows});
    sizes_.push_back(counts.tables);
  }
  router_.sum_sources();
  return {};
}

void NodesRouter::build_tables() {
  state_->outgoing.resize(to_size(topology_.num_nodes()));
  for (std::int32_t token = 0; token < static_cast<std::int32_t>(state_->num_tokens); ++token) {
    const auto begin = to_size(state_->first_place[to_size(token)]);
    const auto end = to_size(state_->first_place[to_size(token) + 1]);
    for (std::size_t i = begin; i < end; ++i) {
      const Place& place = state_->places[i];
      HopTable& table = state_->outgoing[to_size(topology_.node_of(place.rank))];
      if (table.tokens.empty() || table.tokens.back() != token) {
        table.tokens.push_back(token);
        table.first_place.push_back(table.first_place.back());
      }
      table.places.push_back({place.row, static_cast<std::int16_t>(topology_.rail_of(place.rank)), place.topk,
                              static_cast<std::uint8_t>(place.first ? 1 : 0)});
      ++table.first_place.back();
    }
  }
}

Status NodesRouter::exchange_tables() {
  const int num_nodes = topology_.num_nodes();
  std::vector<std::size_t> offsets(to_size(num_nodes) + 1, 0);
  for (int node = 0; node < num_nodes; ++node) {
    const HopTableSize size = table_size(means_.rails.rank_of(node), my_node());
    offsets[to_size(node) + 1] = offsets[to_size(node)] + size.wire_bytes();
  }
  Result<std::byte*> block = means_.staging.hop_tables(offsets.back());
  if (!block.ok()) {
    return means_.crew.fail(
        block.status().code(), me(),
        fmt::format("route: rank {} has no room for the tables of its rail: {}", me(), block.status().message()));
  }
  tables_block_ = *block;
  means_.crew.set_staged(means_.crew.locate(tables_block_, 1, static_cast<std::int64_t>(offsets.back()), 0));
  const auto incoming = [&](int node) {
    return std::span(tables_block_ + offsets[to_size(node)], offsets[to_size(node) + 1] - offsets[to_size(node)]);
  };
  std::vector<std::vector<std::byte>> encoded(to_size(num_nodes));
  for (int node = 0; node < num_nodes; ++node) {
    const HopTable& table = state_->outgoing[to_size(node)];
    if (node == my_node()) {
      hop::encode(table, incoming(node).data());
    } else {
      encoded[to_size(node)].resize(table.size().wire_bytes());
      hop::encode(table, encoded[to_size(node)].data());
    }
  }
  Status status = exchange(
      {[&](int node) { return std::span<const std::byte>(encoded[to_size(node)]); }, incoming, "to send its tables"});
  if (!status.ok()) return status;

  const auto num_rows = std::span<const std::int64_t>(state_->num_rows_on_rank)
                            .subspan(to_size(means_.crew.first_rank()), to_size(topology_.ranks_per_node));
  state_->incoming.resize(to_size(num_nodes));
  for (int node = 0; node < num_nodes; ++node) {
    if (node == my_node()) continue;
    const int rank = means_.rails.rank_of(node);
    Result<HopTable> table =
        hop::parse_hop_table(incoming(node), table_size(rank, my_node()),
                             {state_->num_tokens_of_rank[to_size(rank)], state_->num_topk, num_rows});
    if (!table.ok()) return bad_peer(rank, fmt::format("sent tables that cannot be: {}", table.status().message()));
    // Mates look into those tables only that have rows for them.
    std::vector<std::int64_t> counted;
    for (int mate = means_.crew.first_rank(); mate < means_.crew.end_rank(); ++mate) {
      counted.push_back(router_.rows_between(to_size(rank), to_size(mate)));
    }
    status = check_num_rows(*table, counted);
    if (!status.ok()) return bad_peer(rank, status.message());
    state_->incoming[to_size(node)] = std::move(*table);
  }
  means_.crew.post(Phase::kDone);
  return means_.crew.wait(Phase::kDone);
}

/// Finds this rank's rows in the tables that the ranks of its node hold.
Status NodesRouter::read_tables() {
  const auto num_rows = std::span<const std::int64_t>(state_->num_rows_on_rank)
                            .subspan(to_size(means_.crew.first_rank()), to_size(topology_.ranks_per_node));
  router_.name_sources();
  state_->item_of_row.assign(to_size(state_->num_used_rows), 0);
  for (int rank = 0; rank < topology_.num_ranks; ++rank) {
    state_->num_items_from_rank.push_back(table_size(rank, my_node()).num_items);
  }
  for (int mate = means_.crew.first_rank(); mate < means_.crew.end_rank(); ++mate) {
    std::int64_t block_bytes = 0;
    const auto source = [&](int node) { return node * topology_.ranks_per_node + topology_.rail_of(mate); };
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      block_bytes += static_cast<std::int64_t>(table_size(source(node), my_node()).wire_bytes());
    }
    const std::byte* block = means_.crew.resolve(means_.crew.ticket_of(mate).staged, mate, {1, block_bytes});
    if (block == nullptr) return bad_peer(mate, "published tables outside its arena");
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      const int rank = source(node);
      const HopTableSize size = table_size(rank, my_node());
      const std::size_t table_bytes = size.wire_bytes();
      if (state_->num_rows_from_rank[to_size(rank)] > 0) {
        const Result<HopTable> table = hop::parse_hop_table(
            {block, table_bytes}, size, {state_->num_tokens_of_rank[to_size(rank)], state_->num_topk, num_rows});
        if (!table.ok()) return bad_peer(rank, fmt::format("sent tables that cannot be: {}", table.status().message()));
        if (Status status =
                enter_table(*table, rank, topology_.rail_of(me()), state_->num_rows_from_rank[to_size(rank)],
                            {state_->source_table, state_->item_of_row});
            !status.ok()) {
          return bad_peer(rank, status.message());
        }
      }
      block += table_bytes;
    }
  }
  return {};
}

Status NodesRouter::run() {
  if (Status status = exchange_counts(); !status.ok()) return status;
  if (Status status = read_counts(); !status.ok()) return status;
  if (Status status = router_.check_capacity(); !status.ok()) return status;
  router_.place_tokens();
  router_.begin_sources();
  build_tables();
  if (Status status = exchange_tables(); !status.ok()) return status;
  if (Status status = read_tables(); !status.ok()) return status;
  router_.finish();
  return {};
}

}  // namespace

Result<std::shared_ptr<RoutingState>> route(const RouteCall& call, const Means& means) {
  if (!means.crew.broken().ok()) return means.crew.broken();
  NodesRouter router(call, means);
  Ticket ticket;
  ticket.record = call.record;
  if (ticket.record.code == ErrorCode::kOk) {
    if (Status status = router.prepare(ticket); !status.ok()) ticket.record.set_status(status);
  }
  if (Status status = means.collective.begin(ticket); !status.ok()) return status;
  if (Status status = router.run(); !status.ok()) return status;
  return router.take();
}

}  // namespace ferry::cpu::nodes
