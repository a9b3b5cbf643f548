#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "call/exchange.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/context/run_call.hpp"
#include "cpu/internode/calls.hpp"
#include "cpu/internode/item_slices.hpp"
#include "cpu/rows/row_check.hpp"
#include "cpu/rows/row_copy.hpp"
#include "cpu/rows/token_records.hpp"

/// Dispatch over several nodes. A rank does three things at once, while the network moves chunks: it packs its tokens
/// for other nodes into the rings, forwards arrivals from its rail peers to the ranks of its node, and copies its
/// tokens for its own node.
///
/// Rows are written directly into the receiver's output if all ranks of its node can reach it; otherwise into the
/// receiver's arena, from which the receiver copies them at the end. Records (scales, ids, weights) are in the arena of
/// the source or of the forwarder, and every receiver unpacks the records of its rows.
///
/// Groups that verify their rows check them twice: the forwarder in its ring, the receiver in its output.

namespace ferry::cpu::internode {
namespace {

using node::CallDescriptor;
using node::Location;
using node::Phase;
using plan::Destination;
using plan::ForwardTable;

/// Tokens for this node that are copied between two polls of the network.
constexpr std::int64_t kTokensAtATime = 16;

class Dispatcher {
 public:
  Dispatcher(const DispatchCall& call, const Context& context)
      : call_(call),
        sync_(context.sync),
        peers_(context.sync.peers()),
        rails_(context.sync.rails()),
        staging_(context.staging),
        topology_(context.topology()),
        routing_(static_cast<const CpuRouting&>(*call.routing)),
        verify_(context.verify),
        format_(record_format(call, context.verify)),
        record_bytes_(to_size(format_.size_bytes())) {}

  Status prepare(CallDescriptor& descriptor);
  Status run();

 private:
  struct Target {
    std::byte* rows = nullptr;
    std::int64_t stride_bytes = 0;
  };

  int my_node() const { return rails_.node(); }
  const ForwardTable& incoming(int node) const { return routing_.incoming[to_size(node)]; }
  const ForwardTable& outgoing(int node) const { return routing_.outgoing[to_size(node)]; }
  /// Number of records in a rank's arena: those of its own tokens, then of the items from each node.
  std::int64_t num_records_of(int rank) const;
  Status find_targets();
  Status exchange(const ItemSlice& slice);
  bool pack(const ItemSlice& slice, int node);
  bool forward(const ItemSlice& slice, int node);
  bool copy_own();
  /// Adds the part of an item that has arrived at `from` to the item's checksum, and checks the item at its end.
  void verify_item(const ItemSlice& slice, int node, std::int64_t item, const std::byte* from);
  Status verify_rows();
  Status fail_if_wrong();
  Status receive();
  Status receive_records();

  const DispatchCall& call_;
  call::CallSync& sync_;
  node::Peers& peers_;
  rail::Rails& rails_;
  Staging& staging_;
  const Topology& topology_;
  const CpuRouting& routing_;
  bool verify_;
  plan::TokenRecord format_;
  std::size_t record_bytes_;
  std::byte* records_ = nullptr;          // records of this rank's tokens
  std::vector<std::byte*> records_from_;  // by node: records of the items that arrived from there
  std::vector<Target> targets_;           // by index in the node
  std::byte* staged_ = nullptr;           // receives rows for this rank if peers cannot reach its output
  CopyMode mode_ = CopyMode::kCached;
  std::vector<std::int64_t> next_in_;             // by node: next item to arrive
  std::int64_t next_own_ = 0;                     // item of this rank's table for its own node
  std::vector<std::vector<std::uint64_t>> sums_;  // by node: checksum of each item's slices so far
  std::vector<RecordSource> record_sources_;      // by rank
  RowCheck check_;
};

std::int64_t Dispatcher::num_records_of(int rank) const {
  std::int64_t count = routing_.num_tokens_of_rank[to_size(rank)];
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    const int source = node * topology_.ranks_per_node + topology_.rail_of(rank);
    if (source != rank) count += routing_.num_items_from_rank[to_size(source)];
  }
  return count;
}

Status Dispatcher::prepare(CallDescriptor& descriptor) {
  const std::int64_t num_records = num_records_of(topology_.rank);
  records_from_.assign(to_size(topology_.num_nodes()), nullptr);
  if (record_bytes_ * to_size(num_records) > 0) {
    Result<std::byte*> records = staging_.records(record_bytes_ * to_size(num_records));
    if (!records.ok()) return records.status();
    records_ = *records;
    pack_records(call_, routing_, format_, records_);
    if (verify_) seal_records(call_, {next_call(peers_), topology_.rank, 0}, record_bytes_, records_);
    std::byte* next = records_ + record_bytes_ * to_size(routing_.num_tokens);
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      records_from_[to_size(node)] = next;
      next += record_bytes_ * to_size(incoming(node).num_items());
    }
    const auto stride = static_cast<std::int64_t>(record_bytes_);
    descriptor.records = peers_.locate(records_, num_records, stride, stride);
  }
  const Rows& out = call_.out_x;
  descriptor.output = peers_.locate(out.data, out.num_rows, out.row_bytes, out.stride_bytes);
  bool reachable = true;
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    reachable = reachable && peers_.reachable(descriptor.output, rank);
  }
  if (!reachable) {
    Result<std::byte*> staged = staging_.rows(to_size(routing_.num_used_rows * out.row_bytes));
    if (!staged.ok()) return Status(staged.status().code(), fmt::format("dispatch: {}", staged.status().message()));
    staged_ = *staged;
    descriptor.output = peers_.locate(staged_, routing_.num_used_rows, out.row_bytes, out.row_bytes);
  }
  return {};
}

Status Dispatcher::find_targets() {
  std::int64_t num_written_rows = 0;
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    const Location& output = peers_.descriptor_of(rank).output;
    const std::int64_t num_rows = routing_.num_rows_on_rank[to_size(rank)];
    Target target;
    if (num_rows > 0) {
      target.rows = rank == topology_.rank ? (staged_ != nullptr ? staged_ : call_.out_x.data)
                                           : peers_.resolve(output, rank, {num_rows, call_.x.row_bytes});
      target.stride_bytes = output.stride_bytes;
      if (target.rows == nullptr) return sync_.bad_location(Operation::kDispatch, rank);
    }
    targets_.push_back(target);
  }
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    const ForwardTable& table = node == my_node() ? outgoing(node) : incoming(node);
    num_written_rows += static_cast<std::int64_t>(table.destinations.size());
  }
  mode_ = choose_copy_mode(num_written_rows * call_.x.row_bytes);
  return {};
}

/// Fills and sends one chunk to `node`, if there is room and anything is left to send.
bool Dispatcher::pack(const ItemSlice& slice, int node) {
  rail::Ring& ring = rails_.ring(node);
  const rail::Ring::Batch batch = ring.reserve();
  if (batch.num_items == 0) return false;
  const ForwardTable& table = outgoing(node);
  std::byte* to = batch.to;
  for (std::int64_t item = batch.first; item < batch.first + batch.num_items; ++item) {
    const std::int64_t token = table.tokens[to_size(item)];
    // Cached stores, because the network reads the chunk next.
    copy_row(to, call_.x.row(token) + slice.row_begin, slice.row_bytes(), CopyMode::kCached);
    to += slice.row_bytes();
    if (slice.record_bytes() == 0) continue;
    std::memcpy(to, records_ + to_size(token) * record_bytes_ + slice.record_begin, slice.record_bytes());
    to += slice.record_bytes();
  }
  ring.commit(batch);
  return true;
}

/// Writes the items that have arrived from `node` into their final rows.
bool Dispatcher::forward(const ItemSlice& slice, int node) {
  rail::Ring& ring = rails_.ring(node);
  const std::span<const std::byte> items = ring.front();
  if (items.empty()) return false;
  std::int64_t& next = next_in_[to_size(node)];
  const std::int64_t first = next;
  for (const std::byte* from = items.data(); from != items.data() + items.size(); from += slice.bytes(), ++next) {
    if (verify_) let_tests_damage({CheckedPlace::kRing, topology_.rank, next, {from, slice.bytes()}});
    for (const Destination& destination : incoming(node).destinations_of(next)) {
      if (destination.first == 0 || slice.row_bytes() == 0) continue;
      const Target& target = targets_[static_cast<std::size_t>(destination.rank)];
      copy_row(target.rows + destination.row * target.stride_bytes + slice.row_begin, from, slice.row_bytes(), mode_);
    }
    if (slice.record_bytes() > 0) {
      std::memcpy(records_from_[to_size(node)] + to_size(next) * record_bytes_ + slice.record_begin,
                  from + slice.row_bytes(), slice.record_bytes());
    }
    if (verify_) verify_item(slice, node, next, from);
  }
  ring.release(next - first);
  return true;
}

void Dispatcher::verify_item(const ItemSlice& slice, int node, std::int64_t item, const std::byte* from) {
  const auto row_bytes = to_size(call_.x.row_bytes);
  const std::size_t record_end = std::min(slice.record_end, covered_bytes(record_bytes_));
  const std::size_t record_part_bytes = record_end - std::min(slice.record_begin, record_end);
  std::uint64_t& sum = sums_[to_size(node)][to_size(item)];
  sum += numeric::sum_words(from, slice.row_bytes(), slice.row_begin) +
         numeric::sum_words(from + slice.row_bytes(), record_part_bytes, row_bytes + slice.record_begin);
  if (slice.record_end < record_bytes_) return;
  const int source = node * topology_.ranks_per_node + topology_.rail_of(topology_.rank);
  const std::int32_t token = incoming(node).tokens[to_size(item)];
  const std::byte* const record = records_from_[to_size(node)] + to_size(item) * record_bytes_;
  check_.compare(numeric::checksum_start({peers_.call(), source, token}) + sum, checksum_in(record, record_bytes_),
                 [&]() -> RowCheck::WrongRow {
                   return {fmt::format("item {} (token {} of rank {})", item, token, source),
                           fmt::format("rank {} -> forwarder rank {}", source, topology_.rank), source};
                 });
}

Status Dispatcher::fail_if_wrong() {
  const Status checked = check_.result(sync_);
  return checked.ok() ? checked : sync_.fail(checked.code(), checked.peer(), checked.message());
}

/// Copies a few tokens that stay in the node. False: there are no more.
bool Dispatcher::copy_own() {
  const ForwardTable& table = outgoing(my_node());
  const std::int64_t end = std::min(next_own_ + kTokensAtATime, table.num_items());
  for (; next_own_ < end; ++next_own_) {
    const std::byte* const row = call_.x.row(table.tokens[to_size(next_own_)]);
    for (const Destination& destination : table.destinations_of(next_own_)) {
      if (destination.first == 0) continue;
      const Target& target = targets_[static_cast<std::size_t>(destination.rank)];
      copy_row(target.rows + destination.row * target.stride_bytes, row, to_size(call_.x.row_bytes), mode_);
    }
  }
  return next_own_ < table.num_items();
}

Status Dispatcher::exchange(const ItemSlice& slice) {
  std::vector<rail::Flow> flows(to_size(topology_.num_nodes()));
  for (const int node : rails_.peer_nodes()) {
    flows[to_size(node)] = {outgoing(node).num_items(), incoming(node).num_items(), slice.bytes(), slice.bytes()};
  }
  next_in_.assign(flows.size(), 0);
  call::Exchange exchange(sync_, flows, "to send its tokens or make room for more");
  bool own_left = true;
  while (!exchange.finished()) {
    exchange.begin_turn();
    bool moved = false;
    for (const int node : rails_.peer_nodes()) moved |= pack(slice, node);
    for (const int node : rails_.peer_nodes()) moved |= forward(slice, node);
    if (!moved && own_left) {
      own_left = copy_own();
      moved = true;
    }
    if (Status status = exchange.end_turn(moved); !status.ok()) return status;
  }
  return {};
}

/// Finishes this rank's outputs after all ranks of the node have written.
Status Dispatcher::receive() {
  if (staged_ != nullptr) {
    const CopyMode mode = choose_copy_mode(routing_.num_used_rows * call_.out_x.row_bytes);
    for (std::int64_t row = 0; row < routing_.num_used_rows; ++row) {
      if (!routing_.holds_token(row)) continue;
      copy_row(call_.out_x.row(row), staged_ + row * call_.out_x.row_bytes, to_size(call_.out_x.row_bytes), mode);
    }
    finish_copies(mode);
  }
  if (record_bytes_ > 0) {
    if (Status status = receive_records(); !status.ok()) return status;
  }
  fill_local_outputs(call_, routing_);
  return {};
}

Status Dispatcher::receive_records() {
  record_sources_.assign(to_size(topology_.num_ranks), {});
  for (int rank = 0; rank < topology_.num_ranks; ++rank) {
    if (routing_.num_rows_from_rank[to_size(rank)] == 0) continue;
    // Records of this node's ranks are stored by token; those that crossed the network are stored by item, in the
    // forwarder's arena.
    const int forwarder = peers_.first_rank() + topology_.rail_of(rank);
    const Location& location = peers_.descriptor_of(forwarder).records;
    const auto record_bytes = static_cast<std::int64_t>(record_bytes_);
    const std::byte* const records = peers_.resolve(location, forwarder, {num_records_of(forwarder), record_bytes});
    if (records == nullptr || location.stride_bytes != record_bytes) {
      return sync_.bad_location(Operation::kDispatch, forwarder);
    }
    RecordSource& source = record_sources_[to_size(rank)];
    source.records = records;
    if (rank == forwarder) continue;
    std::int64_t num_before = routing_.num_tokens_of_rank[to_size(forwarder)];
    for (int node = 0; node < topology_.node_of(rank); ++node) {
      const int other = node * topology_.ranks_per_node + topology_.rail_of(rank);
      if (other != forwarder) num_before += routing_.num_items_from_rank[to_size(other)];
    }
    source.records += num_before * record_bytes;
    source.record_of_row = routing_.item_of_row.data();
  }
  unpack_records(call_, routing_, format_, record_sources_);
  return verify_ ? verify_rows() : Status();
}

Status Dispatcher::verify_rows() {
  const auto forwarder_of = [this](int source) {
    const bool is_near = topology_.node_of(source) == my_node();
    return is_near ? source : peers_.first_rank() + topology_.rail_of(source);
  };
  check_received_rows({.call = call_,
                       .routing = routing_,
                       .record_bytes = record_bytes_,
                       .sources = record_sources_,
                       .call_number = peers_.call(),
                       .rank = topology_.rank,
                       .forwarder_of = forwarder_of},
                      check_);
  return fail_if_wrong();
}

Status Dispatcher::run() {
  if (Status status = find_targets(); !status.ok()) return status;
  for (int node = 0; verify_ && node < topology_.num_nodes(); ++node) {
    sums_.emplace_back(to_size(incoming(node).num_items()), 0);
  }
  const auto row_bytes = to_size(call_.x.row_bytes);
  const std::size_t item_bytes = row_bytes + record_bytes_;
  for (std::size_t begin = 0; begin < item_bytes; begin += rails_.chunk_capacity()) {
    const auto slice = ItemSlice::of(row_bytes, record_bytes_, begin, rails_.chunk_capacity());
    if (Status status = exchange(slice); !status.ok()) return status;
  }
  // Before the rows are passed on: then the receivers would find the same rows wrong, after another hop.
  if (Status status = fail_if_wrong(); !status.ok()) return status;
  finish_copies(mode_);
  sync_.post(Phase::kStaged);
  if (Status status = sync_.wait(Phase::kStaged); !status.ok()) return status;
  if (Status status = receive(); !status.ok()) return status;
  sync_.post(Phase::kDone);
  return sync_.wait(Phase::kDone);
}

}  // namespace

Status dispatch(const DispatchCall& call, const Context& context) { return run_call<Dispatcher>(call, context); }

}  // namespace ferry::cpu::internode
