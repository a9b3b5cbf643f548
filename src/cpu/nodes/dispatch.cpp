#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/nodes/item_slices.hpp"
#include "cpu/nodes/nodes_routing.hpp"
#include "cpu/nodes/operations.hpp"
#include "cpu/row_copy.hpp"
#include "cpu/token_records.hpp"
#include "plan/to_size.hpp"

/// Dispatch over several nodes. A rank does four things at once: it packs its tokens for other nodes into the rings, it
/// hands on what comes from its rail peers to the ranks of its node, it copies its tokens for its own node, and the
/// network moves chunks meanwhile.
///
/// Rows are written straight into the receiver's output where all ranks of its node reach that; otherwise into a copy
/// in the receiver's arena, from which the receiver takes them at the end. Records (scales, ids, weights) lie in the
/// arena of the source, or of the forwarder, and every receiver unpacks those of its rows.

namespace ferry::cpu::nodes {
namespace {

using hop::Flow;
using hop::HopPlace;
using hop::HopTable;
using node::Location;
using node::Phase;
using node::Ticket;

/// Tokens of the own node that are copied between two looks at the network.
constexpr std::int64_t kTokensAtATime = 16;

class NodesDispatcher {
 public:
  NodesDispatcher(const DispatchCall& call, const Means& means)
      : call_(call),
        means_(means),
        topology_(means.topology()),
        routing_(static_cast<const NodesRouting&>(*call.routing)),
        record_bytes_(record_format(call).size_bytes) {}

  Status prepare(Ticket& ticket);
  Status run();

 private:
  struct Target {
    std::byte* rows = nullptr;
    std::int64_t stride_bytes = 0;
  };

  int my_node() const { return means_.rails.node(); }
  const HopTable& incoming(int node) const { return routing_.incoming[to_size(node)]; }
  const HopTable& outgoing(int node) const { return routing_.outgoing[to_size(node)]; }
  /// Records in a rank's arena: of its own tokens, then of what came from each node.
  std::int64_t num_records_of(int rank) const;
  std::byte* records_from(int node) const { return records_from_[to_size(node)]; }
  Status bad_peer(int rank) const;
  Status find_targets();
  Status exchange(const ItemSlice& slice);
  void write_items(const ItemSlice& slice, int node, std::int64_t first, std::int64_t count, std::byte* to) const;
  bool hand_on(const ItemSlice& slice, hop::RailExchange& exchange);
  bool copy_own();
  Status receive();

  const DispatchCall& call_;
  const Means& means_;
  const Topology& topology_;
  const NodesRouting& routing_;
  std::size_t record_bytes_;
  std::byte* records_ = nullptr;          // of this rank's tokens
  std::vector<std::byte*> records_from_;  // by node: of the items that came from there
  std::vector<Target> targets_;           // by index in the node
  std::byte* staged_ = nullptr;           // where rows for this rank go when its output is out of reach
  CopyMode mode_ = CopyMode::kCached;
  std::vector<std::int64_t> next_in_;  // by node: item that comes next
  std::int64_t next_own_ = 0;          // item of this rank's table for its own node
};

std::int64_t NodesDispatcher::num_records_of(int rank) const {
  std::int64_t count = routing_.num_tokens_of_rank[to_size(rank)];
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    const int source = node * topology_.ranks_per_node + topology_.rail_of(rank);
    if (source != rank) count += routing_.num_items_from_rank[to_size(source)];
  }
  return count;
}

Status NodesDispatcher::prepare(Ticket& ticket) {
  node::Crew& crew = means_.crew;
  const std::int64_t num_records = num_records_of(topology_.rank);
  records_from_.assign(to_size(topology_.num_nodes()), nullptr);
  if (record_bytes_ * to_size(num_records) > 0) {
    Result<std::byte*> records = means_.staging.records(record_bytes_ * to_size(num_records));
    if (!records.ok()) return records.status();
    records_ = *records;
    pack_records(call_, routing_, records_);
    std::byte* next = records_ + record_bytes_ * to_size(routing_.num_tokens);
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      records_from_[to_size(node)] = next;
      next += record_bytes_ * to_size(incoming(node).num_items());
    }
    const auto stride = static_cast<std::int64_t>(record_bytes_);
    ticket.records = crew.locate(records_, num_records, stride, stride);
  }
  const Rows& out = call_.out_x;
  ticket.output = crew.locate(out.data, out.num_rows, out.row_bytes, out.stride_bytes);
  bool reachable = true;
  for (int rank = crew.first_rank(); rank < crew.end_rank(); ++rank) {
    reachable = reachable && crew.reachable(ticket.output, rank);
  }
  if (!reachable) {
    Result<std::byte*> staged = means_.staging.rows(to_size(routing_.num_used_rows * out.row_bytes));
    if (!staged.ok()) return Status(staged.status().code(), fmt::format("dispatch: {}", staged.status().message()));
    staged_ = *staged;
    ticket.output = crew.locate(staged_, routing_.num_used_rows, out.row_bytes, out.row_bytes);
  }
  return {};
}

Status NodesDispatcher::bad_peer(int rank) const {
  return means_.crew.fail(
      ErrorCode::kInternal, rank,
      fmt::format("dispatch: rank {} named memory outside its arena; please report this bug", rank));
}

Status NodesDispatcher::find_targets() {
  const node::Crew& crew = means_.crew;
  std::int64_t num_written_rows = 0;
  for (int rank = crew.first_rank(); rank < crew.end_rank(); ++rank) {
    const Location& output = crew.ticket_of(rank).output;
    const std::int64_t num_rows = routing_.num_rows_on_rank[to_size(rank)];
    Target target;
    if (num_rows > 0) {
      target.rows = rank == topology_.rank ? (staged_ != nullptr ? staged_ : call_.out_x.data)
                                           : crew.resolve(output, rank, {num_rows, call_.x.row_bytes});
      target.stride_bytes = output.stride_bytes;
      if (target.rows == nullptr) return bad_peer(rank);
    }
    targets_.push_back(target);
  }
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    const HopTable& table = node == my_node() ? outgoing(node) : incoming(node);
    num_written_rows += static_cast<std::int64_t>(table.places.size());
  }
  mode_ = choose_copy_mode(num_written_rows * call_.x.row_bytes);
  return {};
}

void NodesDispatcher::write_items(const ItemSlice& slice, int node, std::int64_t first, std::int64_t count,
                                  std::byte* to) const {
  const HopTable& table = outgoing(node);
  for (std::int64_t item = first; item < first + count; ++item) {
    const std::int64_t token = table.tokens[to_size(item)];
    // Cached stores: the network reads the chunk next.
    copy_row(to, call_.x.row(token) + slice.row_begin, slice.row_bytes(), CopyMode::kCached);
    to += slice.row_bytes();
    if (slice.beside_bytes() == 0) continue;
    std::memcpy(to, records_ + to_size(token) * record_bytes_ + slice.beside_begin, slice.beside_bytes());
    to += slice.beside_bytes();
  }
}

bool NodesDispatcher::hand_on(const ItemSlice& slice, hop::RailExchange& exchange) {
  bool used = false;
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node == my_node()) continue;
    const std::span<const std::byte> bytes = exchange.front(node);
    if (bytes.empty()) continue;
    const std::byte* from = bytes.data();
    std::int64_t& next = next_in_[to_size(node)];
    const std::int64_t first = next;
    for (; from != bytes.data() + bytes.size(); from += slice.bytes(), ++next) {
      for (const HopPlace& place : incoming(node).places_of(next)) {
        if (place.first == 0 || slice.row_bytes() == 0) continue;
        const Target& target = targets_[static_cast<std::size_t>(place.mate)];
        copy_row(target.rows + place.row * target.stride_bytes + slice.row_begin, from, slice.row_bytes(), mode_);
      }
      if (slice.beside_bytes() > 0) {
        std::memcpy(records_from(node) + to_size(next) * record_bytes_ + slice.beside_begin, from + slice.row_bytes(),
                    slice.beside_bytes());
      }
    }
    exchange.pop(node, next - first);
    used = true;
  }
  return used;
}

/// Copies a few tokens that stay in the node. False: there are no more.
bool NodesDispatcher::copy_own() {
  const HopTable& table = outgoing(my_node());
  const std::int64_t end = std::min(next_own_ + kTokensAtATime, table.num_items());
  for (; next_own_ < end; ++next_own_) {
    const std::byte* const row = call_.x.row(table.tokens[to_size(next_own_)]);
    for (const HopPlace& place : table.places_of(next_own_)) {
      if (place.first == 0) continue;
      const Target& target = targets_[static_cast<std::size_t>(place.mate)];
      copy_row(target.rows + place.row * target.stride_bytes, row, to_size(call_.x.row_bytes), mode_);
    }
  }
  return next_own_ < table.num_items();
}

Status NodesDispatcher::exchange(const ItemSlice& slice) {
  std::vector<Flow> flows(to_size(topology_.num_nodes()));
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node == my_node()) continue;
    flows[to_size(node)] = {outgoing(node).num_items(), incoming(node).num_items(), slice.bytes(), slice.bytes()};
  }
  next_in_.assign(flows.size(), 0);
  hop::Collective::Items items;
  items.waiting_for = "to send its tokens or make room for more";
  items.write = [&](int node, std::int64_t first, std::int64_t count, std::byte* to) {
    write_items(slice, node, first, count, to);
  };
  items.use = [&](hop::RailExchange& exchange) { return hand_on(slice, exchange); };
  items.meanwhile = [this] { return copy_own(); };
  return means_.collective.exchange(std::move(flows), items);
}

/// After all ranks of the node have written: what this rank does with its own outputs.
Status NodesDispatcher::receive() {
  node::Crew& crew = means_.crew;
  if (staged_ != nullptr) {
    const CopyMode mode = choose_copy_mode(routing_.num_used_rows * call_.out_x.row_bytes);
    for (std::int64_t row = 0; row < routing_.num_used_rows; ++row) {
      if (routing_.source_table[to_size(row) * 2] < 0) continue;
      copy_row(call_.out_x.row(row), staged_ + row * call_.out_x.row_bytes, to_size(call_.out_x.row_bytes), mode);
    }
    finish_copies(mode);
  }
  if (record_bytes_ > 0) {
    std::vector<RecordSource> sources(to_size(topology_.num_ranks));
    for (int rank = 0; rank < topology_.num_ranks; ++rank) {
      if (routing_.num_rows_from_rank[to_size(rank)] == 0) continue;
      // Own ranks' records are by token, what crossed the network is by item, in the forwarder's arena.
      const int holder = crew.first_rank() + topology_.rail_of(rank);
      const Location& location = crew.ticket_of(holder).records;
      const auto record_bytes = static_cast<std::int64_t>(record_bytes_);
      const std::byte* const records = crew.resolve(location, holder, {num_records_of(holder), record_bytes});
      if (records == nullptr || location.stride_bytes != record_bytes) return bad_peer(holder);
      RecordSource& source = sources[to_size(rank)];
      source.records = records;
      if (rank == holder) continue;
      std::int64_t num_before = routing_.num_tokens_of_rank[to_size(holder)];
      for (int node = 0; node < topology_.node_of(rank); ++node) {
        const int other = node * topology_.ranks_per_node + topology_.rail_of(rank);
        if (other != holder) num_before += routing_.num_items_from_rank[to_size(other)];
      }
      source.records += num_before * record_bytes;
      source.record_of_row = routing_.item_of_row.data();
    }
    unpack_records(call_, routing_, sources);
  }
  fill_local_outputs(call_, routing_);
  return {};
}

Status NodesDispatcher::run() {
  if (Status status = find_targets(); !status.ok()) return status;
  const auto row_bytes = to_size(call_.x.row_bytes);
  const std::size_t item_bytes = row_bytes + record_bytes_;
  for (std::size_t begin = 0; begin < item_bytes; begin += means_.rails.chunk_capacity()) {
    const auto slice = ItemSlice::of(row_bytes, record_bytes_, begin, means_.rails.chunk_capacity());
    if (Status status = exchange(slice); !status.ok()) return status;
  }
  finish_copies(mode_);
  means_.crew.post(Phase::kStaged);
  if (Status status = means_.crew.wait(Phase::kStaged); !status.ok()) return status;
  if (Status status = receive(); !status.ok()) return status;
  means_.crew.post(Phase::kDone);
  return means_.crew.wait(Phase::kDone);
}

}  // namespace

Status dispatch(const DispatchCall& call, const Means& means) {
  if (!means.crew.broken().ok()) return means.crew.broken();
  Ticket ticket;
  ticket.record = call.record;
  if (call.record.code != ErrorCode::kOk) return means.collective.begin(ticket);
  NodesDispatcher dispatcher(call, means);
  if (Status status = dispatcher.prepare(ticket); !status.ok()) ticket.record.set_status(status);
  if (Status status = means.collective.begin(ticket); !status.ok()) return status;
  return dispatcher.run();
}

}  // namespace ferry::cpu::nodes
