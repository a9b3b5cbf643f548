#include "call/route_nodes.hpp"

#include <fmt/format.h>

#include <vector>

#include "call/exchange.hpp"
#include "plan/peer_counts.hpp"

namespace ferry::call {
namespace {

using node::CallDescriptor;
using node::Phase;
using plan::ForwardTable;
using plan::ForwardTableSize;
using plan::PeerCounts;

class Router {
 public:
  Router(CallSync& sync, const NodesRouteCall& call, RouteMemory& memory, plan::NodeRoute& route)
      : call_(call),
        sync_(sync),
        peers_(sync.peers()),
        memory_(memory),
        topology_(sync.topology()),
        shape_(call.shape),
        route_(route) {}

  /// Counts this rank's own tokens and fills in the descriptor.
  Status prepare(CallDescriptor& descriptor);
  /// Runs the exchanges, after all descriptors have arrived.
  Status run();

 private:
  std::int64_t num_experts() const { return static_cast<std::int64_t>(shape_.num_experts); }
  int my_node() const { return topology_.node_of(topology_.rank); }
  std::byte* counts_from(int node) const { return counts_block_ + to_size(node) * counts_bytes_; }
  ForwardTableSize table_size(int source_rank, int node) const { return sizes_[to_size(source_rank)][to_size(node)]; }
  /// Rank in `node` on the rail of `local`, a rank of this node.
  int rail_peer(int local, int node) const { return node * topology_.ranks_per_node + topology_.rail_of(local); }
  /// Used rows of each rank of this node.
  std::span<const std::int64_t> num_rows_of_node() const {
    return std::span<const std::int64_t>(route_.num_rows_on_rank)
        .subspan(to_size(peers_.first_rank()), to_size(topology_.ranks_per_node));
  }
  Status bad_peer(int rank, std::string_view what) const;
  Status exchange_counts();
  Status read_counts();
  Status exchange_tables();
  Status check_incoming(int node, std::span<const std::byte> bytes);
  void name_source_ranks();
  Status read_tables();

  const NodesRouteCall& call_;
  CallSync& sync_;
  node::Peers& peers_;
  RouteMemory& memory_;
  const Topology& topology_;
  const plan::RouteShape& shape_;
  plan::NodeRoute& route_;
  std::byte* counts_block_ = nullptr;  // by node, in the arena: counts of this rank and its rail peers
  std::size_t counts_bytes_ = 0;
  std::vector<plan::SourceCounts> sources_;     // by rank
  std::vector<const ForwardTableSize*> sizes_;  // [rank][node]
};

Status Router::prepare(CallDescriptor& descriptor) {
  counts_bytes_ = PeerCounts::at(nullptr, topology_, num_experts()).wire_bytes;
  Result<std::byte*> block = memory_.counts(counts_bytes_ * to_size(topology_.num_nodes()));
  if (!block.ok()) return block.status();
  counts_block_ = *block;
  const PeerCounts mine = PeerCounts::at(counts_from(my_node()), topology_, num_experts());
  plan::count_tokens(shape_, call_.ids, mine.rank_counts, mine.expert_counts);
  plan::count_forward_tables(shape_, topology_, call_.ids, mine.tables);
  const auto stride = static_cast<std::int64_t>(counts_bytes_);
  descriptor.tables = peers_.locate(counts_block_, topology_.num_nodes(), stride, stride);
  descriptor.max_recv_rows = call_.max_recv_rows;
  descriptor.num_entries = static_cast<std::int64_t>(call_.ids.size());
  return {};
}

Status Router::bad_peer(int rank, std::string_view what) const {
  return sync_.fail(ErrorCode::kTransport, rank,
                    fmt::format("route: rank {} {}; run the same build on every rank", rank, what));
}

Status Router::exchange_counts() {
  std::vector<std::span<const std::byte>> out(to_size(topology_.num_nodes()));
  std::vector<std::span<std::byte>> in(out.size());
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    out[to_size(node)] = {counts_from(my_node()), counts_bytes_};
    in[to_size(node)] = {counts_from(node), counts_bytes_};
  }
  if (Status status = exchange_bytes(sync_, out, in, "to send its counts"); !status.ok()) return status;
  sync_.post(Phase::kStaged);
  return sync_.wait(Phase::kStaged);
}

Status Router::read_counts() {
  const auto stride = static_cast<std::int64_t>(counts_bytes_);
  std::vector<std::byte*> blocks;
  for (int local = peers_.first_rank(); local < peers_.end_rank(); ++local) {
    const node::Location& location = peers_.descriptor_of(local).tables;
    blocks.push_back(peers_.resolve(location, local, {topology_.num_nodes(), stride}));
    if (blocks.back() == nullptr || location.stride_bytes != stride) {
      return bad_peer(local, "published counts outside its arena");
    }
  }
  for (int rank = 0; rank < topology_.num_ranks; ++rank) {
    std::byte* const base = blocks[to_size(topology_.rail_of(rank))] + topology_.node_of(rank) * stride;
    const PeerCounts counts = PeerCounts::at(base, topology_, num_experts());
    const CallSync::PeerCall& call = sync_.call_of(rank);
    if (Status status = plan::check_counts(counts, shape_, topology_, call.num_entries); !status.ok()) {
      return bad_peer(rank, status.message());
    }
    sources_.push_back({counts.rank_counts, counts.expert_counts, call.num_entries, call.max_recv_rows});
    sizes_.push_back(counts.tables);
  }
  return {};
}

Status Router::exchange_tables() {
  const int num_nodes = topology_.num_nodes();
  std::vector<std::size_t> offsets(to_size(num_nodes) + 1, 0);
  plan::ForwardTableSum sum;
  for (int node = 0; node < num_nodes; ++node) {
    const ForwardTableSize size = table_size(rail_peer(topology_.rank, node), my_node());
    offsets[to_size(node) + 1] = offsets[to_size(node)] + size.wire_bytes();
    sum.num_items += size.num_items;
    sum.num_destinations += size.num_destinations;
  }
  Result<std::byte*> block = memory_.forward_tables(plan::forward_tables_bytes(to_size(num_nodes), sum));
  if (!block.ok()) {
    return sync_.fail(block.status().code(), topology_.rank,
                      fmt::format("route: rank {} has no room for the forward tables of its rail: {}", topology_.rank,
                                  block.status().message()));
  }
  peers_.set_staged(peers_.locate(*block, 1, static_cast<std::int64_t>(offsets.back()), 0));
  std::vector<std::vector<std::byte>> encoded(to_size(num_nodes));
  std::vector<std::span<const std::byte>> out(encoded.size());
  std::vector<std::span<std::byte>> in(encoded.size());
  for (int node = 0; node < num_nodes; ++node) {
    const auto index = to_size(node);
    const ForwardTable& table = route_.outgoing[index];
    in[index] = {*block + offsets[index], offsets[index + 1] - offsets[index]};
    if (node == my_node()) {
      plan::encode(table, in[index].data());
    } else {
      encoded[index].resize(table.size().wire_bytes());
      plan::encode(table, encoded[index].data());
      out[index] = encoded[index];
    }
  }
  if (Status status = exchange_bytes(sync_, out, in, "to send its tables"); !status.ok()) return status;
  route_.incoming.resize(to_size(num_nodes));
  for (const int node : sync_.rails().peer_nodes()) {
    if (Status status = check_incoming(node, in[to_size(node)]); !status.ok()) return status;
  }
  sync_.post(Phase::kDone);
  return sync_.wait(Phase::kDone);
}

/// Checks the table of a rail peer on behalf of all ranks of this node, and keeps it.
Status Router::check_incoming(int node, std::span<const std::byte> bytes) {
  const int rank = rail_peer(topology_.rank, node);
  Result<ForwardTable> table = plan::parse_forward_table(
      bytes, table_size(rank, my_node()),
      {route_.num_tokens_of_rank[to_size(rank)], static_cast<std::int64_t>(shape_.num_topk), num_rows_of_node()});
  if (!table.ok()) return bad_peer(rank, fmt::format("sent an invalid forward table: {}", table.status().message()));
  // Local ranks read only tables that contain rows for them, so the counts are checked here.
  std::vector<std::int64_t> counted;
  for (int local = peers_.first_rank(); local < peers_.end_rank(); ++local) {
    counted.push_back(plan::rows_from_source(shape_, sources_[to_size(rank)], to_size(local)));
  }
  if (Status status = plan::check_num_rows(*table, counted); !status.ok()) return bad_peer(rank, status.message());
  route_.incoming[to_size(node)] = std::move(*table);
  return {};
}

/// Enters the source rank of each row, which the counts determine, into source_table.
void Router::name_source_ranks() {
  plan::for_each_received_run(
      shape_, sources_, route_.groups, to_size(topology_.rank),
      [this](std::size_t /*run*/, std::size_t source, std::int64_t first_row, std::int32_t num_rows) {
        for (std::int64_t row = first_row; row < first_row + num_rows; ++row) {
          route_.source_table[to_size(row) * 2] = static_cast<std::int32_t>(source);
        }
      });
}

/// Finds this rank's rows in the tables that the ranks of its node hold.
Status Router::read_tables() {
  route_.item_of_row.assign(to_size(route_.num_used_rows), 0);
  for (int rank = 0; rank < topology_.num_ranks; ++rank) {
    route_.num_items_from_rank.push_back(table_size(rank, my_node()).num_items);
  }
  for (int local = peers_.first_rank(); local < peers_.end_rank(); ++local) {
    std::int64_t block_bytes = 0;
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      block_bytes += static_cast<std::int64_t>(table_size(rail_peer(local, node), my_node()).wire_bytes());
    }
    const std::byte* block = peers_.resolve(peers_.descriptor_of(local).staged, local, {1, block_bytes});
    if (block == nullptr) return bad_peer(local, "published tables outside its arena");
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      const int rank = rail_peer(local, node);
      const ForwardTableSize size = table_size(rank, my_node());
      const std::span<const std::byte> bytes(block, size.wire_bytes());
      block += bytes.size();
      const std::int64_t num_rows = route_.num_rows_from_rank[to_size(rank)];
      if (num_rows == 0) continue;
      const Result<ForwardTable> table = plan::parse_forward_table(
          bytes, size,
          {route_.num_tokens_of_rank[to_size(rank)], static_cast<std::int64_t>(shape_.num_topk), num_rows_of_node()});
      if (!table.ok()) {
        return bad_peer(rank, fmt::format("sent an invalid forward table: {}", table.status().message()));
      }
      if (Status status = plan::enter_table(*table, rank, topology_.rail_of(topology_.rank), num_rows,
                                            {route_.source_table, route_.item_of_row});
          !status.ok()) {
        return bad_peer(rank, status.message());
      }
    }
  }
  return {};
}

Status Router::run() {
  if (Status status = exchange_counts(); !status.ok()) return status;
  if (Status status = read_counts(); !status.ok()) return status;
  route_.groups = plan::group_experts(shape_, sources_);
  if (Status status = plan::check_capacity(shape_, sources_, route_.groups); !status.ok()) return status;
  plan_rows(shape_, sources_, to_size(topology_.rank), call_.ids, route_);
  route_.outgoing = plan::build_forward_tables(route_.tokens, topology_);
  if (Status status = exchange_tables(); !status.ok()) return status;
  name_source_ranks();
  return read_tables();
}

}  // namespace

Status route_nodes(CallSync& sync, const NodesRouteCall& call, RouteMemory& memory, plan::NodeRoute& route) {
  if (!sync.broken().ok()) return sync.broken();
  Router router(sync, call, memory, route);
  CallDescriptor descriptor;
  descriptor.record = call.record;
  if (call.record.code == ErrorCode::kOk) {
    if (Status status = router.prepare(descriptor); !status.ok()) descriptor.record.set_status(status);
  }
  if (Status status = sync.begin(descriptor); !status.ok()) return status;
  return router.run();
}

}  // namespace ferry::call
