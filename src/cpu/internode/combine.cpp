#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "call/exchange.hpp"
#include "cpu/context/routing.hpp"
#include "cpu/context/run_call.hpp"
#include "cpu/internode/calls.hpp"
#include "cpu/internode/item_slices.hpp"
#include "cpu/rows/combine_inputs.hpp"
#include "cpu/rows/rank_sums.hpp"
#include "cpu/rows/row_check.hpp"
#include "cpu/rows/row_sum.hpp"
#include "plan/checksum_table.hpp"

/// Combine over several nodes. A forwarder sums its node's rows for each token of its rail peers and sends one row per
/// token back; a source sums its own node's rows, and then biases and nodes in ascending order. Weights of a weighted
/// sum are sent to the forwarders first. With FP8 sums of ranks, the rank that adds them quantises each; the row of a
/// node stays as given.
///
/// Groups that verify their rows check each row before it is summed, and what crossed the network before it is used: a
/// forwarder's sum, with the returned weights, and the weights of a token end with a checksum.

namespace ferry::cpu::internode {
namespace {

using node::CallDescriptor;
using node::Phase;
using plan::Destination;
using plan::ForwardTable;

/// Weights are sent in multiples of this, like rows.
constexpr auto kAlignmentBytes = static_cast<std::size_t>(kRowGranuleBytes);

class Combiner {
 public:
  Combiner(const CombineCall& call, const Context& context)
      : call_(call),
        context_(context),
        sync_(context.sync),
        peers_(context.sync.peers()),
        rails_(context.sync.rails()),
        topology_(context.topology()),
        routing_(static_cast<const CpuRouting&>(*call.routing)),
        entries_bytes_((to_size(routing_.num_topk) * sizeof(float) + kAlignmentBytes - 1) / kAlignmentBytes *
                       kAlignmentBytes),
        checksum_bytes_(context.verify ? to_size(plan::kChecksumWords) * sizeof(std::int32_t) : 0),
        sum_row_(choose_row_sum(call.x.dtype)),
        rank_sums_(call) {}

  Status prepare(CallDescriptor& descriptor);
  Status run();

 private:
  int my_node() const { return rails_.node(); }
  bool returns_weights() const { return call_.weights.present(); }
  bool verifies() const { return checksum_bytes_ > 0; }
  /// Whether a slice holds returned weights: all of them or none, see run().
  bool holds_weights(const ItemSlice& slice) const { return returns_weights() && slice.record_bytes() > 0; }
  Status find_senders();
  void verify_topk_weights();
  void verify_held_row(const Destination& destination, const ItemSlice& slice);
  /// Adds an item's slice to its checksum; at the item's end returns it, with the sums' forwarder as sender.
  std::optional<std::uint64_t> add_slice(std::uint64_t& sum, const ItemSlice& slice, const std::byte* data,
                                         const numeric::RowIdentity& identity) const;
  void verify_sum(const ItemSlice& slice, int node, std::int64_t item, const std::byte* data);
  Status fail_if_wrong();
  Status exchange_topk_weights();
  Status exchange_sums(const ItemSlice& slice);
  /// Sums this node's rows of an item; `topk_weights` [K] if the sum is weighted.
  void sum_item(std::span<const Destination> destinations, const float* topk_weights, const ItemSlice& slice,
                std::byte* to);
  /// Sums the item's returned weights over this node's rows.
  void sum_item_weights(std::span<const Destination> destinations, std::byte* to);
  bool send_sums(const ItemSlice& slice, int node);
  bool finish_tokens(const ItemSlice& slice);
  bool finish_token(const ItemSlice& slice);
  void add_token_weights(std::span<const Destination> destinations, const float* node_weights, float* out) const;

  const CombineCall& call_;
  const Context& context_;
  call::CallSync& sync_;
  node::Peers& peers_;
  rail::Rails& rails_;
  const Topology& topology_;
  const CpuRouting& routing_;
  std::size_t entries_bytes_;         // bytes of K floats in a message
  std::size_t checksum_bytes_;        // at the end of what crosses the network; 0 unless the group verifies it
  std::vector<CombineRows> senders_;  // by index in the node
  std::vector<const std::uint64_t*> checksums_;            // by index in the node, as senders_
  std::vector<std::vector<std::uint64_t>> sent_sums_;      // by node: checksum of each item's slices so far
  std::vector<std::vector<std::uint64_t>> received_sums_;  // by node
  RowCheck check_;
  RowSumFunction sum_row_;
  RankSums rank_sums_;
  std::vector<std::vector<float>> topk_weights_;  // by node: [items, entries_bytes_ / 4] weights of the sources there
  std::vector<std::byte> own_sum_;                // sum of this node's rows for the token being finished
  std::vector<float> entries_;                    // scratch of an item's returned weights
  std::vector<float> node_weights_;               // weights that a node returned for the token being finished
  std::vector<const std::byte*> rows_;            // scratch of a sum
  std::vector<float> weights_;
  std::int64_t next_token_ = 0;
  std::vector<std::int64_t> next_item_;  // by node: first unfinished item of its table
};

Status Combiner::prepare(CallDescriptor& descriptor) {
  if (verifies()) {
    if (Status status = publish_checksums(call_, routing_, context_, descriptor); !status.ok()) return status;
  }
  const node::Location rows = peers_.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  bool reachable = true;
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    reachable = reachable && peers_.reachable(rows, rank);
  }
  return publish_combine_inputs(call_, routing_, context_, reachable, descriptor);
}

Status Combiner::find_senders() {
  for (int rank = peers_.first_rank(); rank < peers_.end_rank(); ++rank) {
    CombineRows& sender = senders_.emplace_back();
    checksums_.push_back(nullptr);
    if (routing_.num_rows_on_rank[to_size(rank)] == 0) continue;
    Result<CombineRows> rows = resolve_combine_inputs(call_, routing_, context_, rank);
    if (!rows.ok()) return rows.status();
    sender = *rows;
    if (!verifies()) continue;
    checksums_.back() =
        find_checksums(peers_, peers_.descriptor_of(rank), rank, routing_.num_rows_on_rank[to_size(rank)]);
    if (checksums_.back() == nullptr) return sync_.bad_location(Operation::kCombine, rank);
  }
  return {};
}

void Combiner::verify_held_row(const Destination& destination, const ItemSlice& slice) {
  if (!verifies() || destination.first == 0 || slice.row_begin != 0) return;
  const auto index = static_cast<std::size_t>(destination.rank);
  check_held_row(call_, routing_, peers_.call(),
                 {senders_[index], checksums_[index], peers_.first_rank() + destination.rank, topology_.rank},
                 destination.row, check_);
}

std::optional<std::uint64_t> Combiner::add_slice(std::uint64_t& sum, const ItemSlice& slice, const std::byte* data,
                                                 const numeric::RowIdentity& identity) const {
  const std::size_t weights_bytes = holds_weights(slice) ? entries_bytes_ : 0;
  sum += numeric::sum_words(data, slice.row_bytes(), slice.row_begin) +
         numeric::sum_words(data + slice.row_bytes(), weights_bytes, to_size(call_.x.row_bytes));
  if (slice.record_bytes() == 0) return {};
  return numeric::checksum_start(identity) + sum;
}

void Combiner::verify_sum(const ItemSlice& slice, int node, std::int64_t item, const std::byte* data) {
  const int forwarder = rails_.rank_of(node);
  let_tests_damage({CheckedPlace::kNodeSum, topology_.rank, item, {data, slice.bytes()}});
  const std::optional<std::uint64_t> observed = add_slice(received_sums_[to_size(node)][to_size(item)], slice, data,
                                                          {peers_.call(), forwarder, static_cast<std::int32_t>(item)});
  if (!observed) return;
  check_.compare(*observed, checksum_in(data, slice.bytes()), [&]() -> RowCheck::WrongRow {
    return {fmt::format("sum {} of node {} (token {})", item, node, next_token_),
            fmt::format("forwarder rank {} -> rank {}", forwarder, topology_.rank), forwarder};
  });
}

Status Combiner::fail_if_wrong() {
  const Status checked = check_.result(sync_);
  return checked.ok() ? checked : sync_.fail(checked.code(), checked.peer(), checked.message());
}

void Combiner::verify_topk_weights() {
  const std::size_t item_bytes = entries_bytes_ + checksum_bytes_;
  for (const int node : rails_.peer_nodes()) {
    const int source = rails_.rank_of(node);
    const ForwardTable& table = routing_.incoming[to_size(node)];
    const auto* weights = reinterpret_cast<const std::byte*>(topk_weights_[to_size(node)].data());
    for (std::int64_t item = 0; item < table.num_items(); ++item, weights += item_bytes) {
      const std::int32_t token = table.tokens[to_size(item)];
      let_tests_damage({CheckedPlace::kWeights, topology_.rank, item, {weights, item_bytes}});
      check_.compare(row_checksum({peers_.call(), source, token}, {{weights, entries_bytes_}}),
                     checksum_in(weights, item_bytes), [&]() -> RowCheck::WrongRow {
                       return {fmt::format("the weights of token {} of rank {}", token, source),
                               fmt::format("rank {} -> forwarder rank {}", source, topology_.rank), source};
                     });
    }
  }
}

Status Combiner::exchange_topk_weights() {
  const std::size_t floats_per_item = (entries_bytes_ + checksum_bytes_) / sizeof(float);
  const auto num_topk = to_size(routing_.num_topk);
  const auto* const table = static_cast<const float*>(call_.topk_weights.data);
  std::vector<std::vector<float>> mine(to_size(topology_.num_nodes()));
  std::vector<std::span<const std::byte>> out(mine.size());
  std::vector<std::span<std::byte>> in(mine.size());
  for (const int node : rails_.peer_nodes()) {
    const auto index = to_size(node);
    const std::vector<std::int32_t>& tokens = routing_.outgoing[index].tokens;
    mine[index].resize(tokens.size() * floats_per_item);
    for (std::size_t item = 0; item < tokens.size(); ++item) {
      float* const weights = mine[index].data() + item * floats_per_item;
      std::copy_n(table + to_size(tokens[item]) * num_topk, num_topk, weights);
      if (!verifies()) continue;
      auto* const bytes = reinterpret_cast<std::byte*>(weights);
      put_checksum(bytes, entries_bytes_ + checksum_bytes_,
                   row_checksum({peers_.call(), topology_.rank, tokens[item]}, {{bytes, entries_bytes_}}));
    }
    topk_weights_[index].resize(to_size(routing_.incoming[index].num_items()) * floats_per_item);
    out[index] = std::as_bytes(std::span(mine[index]));
    in[index] = std::as_writable_bytes(std::span(topk_weights_[index]));
  }
  Status status = call::exchange_bytes(sync_, out, in, "to send its tokens' weights");
  if (!status.ok() || !verifies()) return status;
  verify_topk_weights();
  return fail_if_wrong();
}

void Combiner::sum_item(std::span<const Destination> destinations, const float* topk_weights, const ItemSlice& slice,
                        std::byte* to) {
  if (call_.rank_sums) {
    rank_sums_.begin(slice.row_bytes());
    for (const Destination& destination : destinations) {
      verify_held_row(destination, slice);
      const CombineRows& sender = senders_[static_cast<std::size_t>(destination.rank)];
      rank_sums_.add(destination.rank, sender.rows + destination.row * sender.stride_bytes + slice.row_begin,
                     topk_weights[destination.topk]);
    }
    rank_sums_.finish(to);
    return;
  }
  rows_.clear();
  weights_.clear();
  for (const Destination& destination : destinations) {
    if (!call_.weighted && destination.first == 0) continue;
    verify_held_row(destination, slice);
    const CombineRows& sender = senders_[static_cast<std::size_t>(destination.rank)];
    rows_.push_back(sender.rows + destination.row * sender.stride_bytes + slice.row_begin);
    if (call_.weighted) weights_.push_back(topk_weights[destination.topk]);
  }
  sum_row_({rows_.data(), call_.weighted ? weights_.data() : nullptr, rows_.size(), to, slice.row_bytes()});
}

void Combiner::sum_item_weights(std::span<const Destination> destinations, std::byte* to) {
  const auto num_topk = to_size(routing_.num_topk);
  entries_.assign(entries_bytes_ / sizeof(float), 0.0F);
  for (const Destination& destination : destinations) {
    const float* weights = senders_[static_cast<std::size_t>(destination.rank)].weights;
    if (routing_.layout != Layout::kTokens) {
      entries_[destination.topk] = weights[destination.row];
    } else if (destination.first != 0) {
      const float* row = weights + to_size(destination.row) * num_topk;
      for (std::size_t topk = 0; topk < num_topk; ++topk) entries_[topk] += row[topk];
    }
  }
  std::memcpy(to, entries_.data(), entries_bytes_);
}

/// Sums and sends one chunk of the node's rows to `node`, if there is room and anything is left to send.
bool Combiner::send_sums(const ItemSlice& slice, int node) {
  rail::Ring& ring = rails_.ring(node);
  const rail::Ring::Batch batch = ring.reserve();
  if (batch.num_items == 0) return false;
  const ForwardTable& table = routing_.incoming[to_size(node)];
  const std::size_t floats_per_item = (entries_bytes_ + checksum_bytes_) / sizeof(float);
  std::byte* to = batch.to;
  for (std::int64_t item = batch.first; item < batch.first + batch.num_items; ++item, to += slice.bytes()) {
    const std::span<const Destination> destinations = table.destinations_of(item);
    if (slice.row_bytes() > 0) {
      const float* const weights =
          call_.weighted ? topk_weights_[to_size(node)].data() + to_size(item) * floats_per_item : nullptr;
      sum_item(destinations, weights, slice, to);
    }
    if (holds_weights(slice)) sum_item_weights(destinations, to + slice.row_bytes());
    if (!verifies()) continue;
    const numeric::RowIdentity identity{peers_.call(), topology_.rank, static_cast<std::int32_t>(item)};
    const auto checksum = add_slice(sent_sums_[to_size(node)][to_size(item)], slice, to, identity);
    if (checksum) put_checksum(to, slice.bytes(), *checksum);
  }
  // The source could not find a wrong row any more in the sum.
  if (!check_.all_right()) return false;
  ring.commit(batch);
  return true;
}

void Combiner::add_token_weights(std::span<const Destination> destinations, const float* node_weights,
                                 float* out) const {
  if (routing_.layout == Layout::kTokens) {
    for (std::size_t topk = 0; topk < to_size(routing_.num_topk); ++topk) out[topk] += node_weights[topk];
  } else {
    for (const Destination& destination : destinations) out[destination.topk] = node_weights[destination.topk];
  }
}

/// Sums the next token if the rows of all nodes for it have arrived. False: they have not, or there are no more tokens.
bool Combiner::finish_token(const ItemSlice& slice) {
  if (next_token_ == routing_.num_tokens) return false;
  const auto has_next = [this](int node) {
    const ForwardTable& table = routing_.outgoing[to_size(node)];
    const std::int64_t item = next_item_[to_size(node)];
    return item < table.num_items() && table.tokens[to_size(item)] == next_token_;
  };
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node != my_node() && has_next(node) && rails_.ring(node).front().empty()) return false;
  }
  float* const out_weights =
      holds_weights(slice) ? static_cast<float*>(call_.out_weights.data) + next_token_ * routing_.num_topk : nullptr;
  if (out_weights != nullptr) std::fill_n(out_weights, routing_.num_topk, 0.0F);

  const ForwardTable& own = routing_.outgoing[to_size(my_node())];
  const float* const topk_weights =
      call_.weighted ? static_cast<const float*>(call_.topk_weights.data) + next_token_ * routing_.num_topk : nullptr;
  const bool own_node = has_next(my_node());
  const std::span<const Destination> own_destinations =
      own_node ? own.destinations_of(next_item_[to_size(my_node())]) : std::span<const Destination>();
  if (own_node) sum_item(own_destinations, topk_weights, slice, own_sum_.data());

  rows_.clear();
  for (const ConstRows& bias : call_.bias) {
    if (bias.present()) rows_.push_back(bias.row(next_token_) + slice.row_begin);
  }
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (!has_next(node)) continue;
    const std::byte* const item = node == my_node() ? own_sum_.data() : rails_.ring(node).front().data();
    rows_.push_back(item);
    if (verifies() && node != my_node()) verify_sum(slice, node, next_item_[to_size(node)], item);
    if (out_weights == nullptr) continue;
    if (node == my_node()) {
      sum_item_weights(own_destinations, reinterpret_cast<std::byte*>(node_weights_.data()));
    } else {
      std::memcpy(node_weights_.data(), item + slice.row_bytes(), entries_bytes_);
    }
    add_token_weights(routing_.outgoing[to_size(node)].destinations_of(next_item_[to_size(node)]), node_weights_.data(),
                      out_weights);
  }
  if (slice.row_bytes() > 0) {
    sum_row_({rows_.data(), nullptr, rows_.size(), call_.out_x.row(next_token_) + slice.row_begin, slice.row_bytes()});
  }
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (!has_next(node)) continue;
    if (node != my_node()) rails_.ring(node).release(1);
    // Advance last: has_next reads next_item_.
    ++next_item_[to_size(node)];
  }
  ++next_token_;
  return true;
}

bool Combiner::finish_tokens(const ItemSlice& slice) {
  // About a chunk or two at a time, so that the forwarding of other ranks' sums continues.
  constexpr int kTokensAtATime = 16;
  int num_finished = 0;
  while (num_finished < kTokensAtATime && finish_token(slice)) ++num_finished;
  return num_finished > 0;
}

Status Combiner::exchange_sums(const ItemSlice& slice) {
  std::vector<rail::Flow> flows(to_size(topology_.num_nodes()));
  for (const int node : rails_.peer_nodes()) {
    flows[to_size(node)] = {routing_.incoming[to_size(node)].num_items(), routing_.outgoing[to_size(node)].num_items(),
                            slice.bytes(), slice.bytes()};
  }
  next_token_ = 0;
  next_item_.assign(flows.size(), 0);
  own_sum_.resize(slice.row_bytes());
  node_weights_.resize(entries_bytes_ / sizeof(float));
  call::Exchange exchange(sync_, flows, "to send its node's sums or make room for more");
  while (!exchange.finished()) {
    exchange.begin_turn();
    bool moved = false;
    for (const int node : rails_.peer_nodes()) moved |= send_sums(slice, node);
    moved |= finish_tokens(slice);
    if (Status status = fail_if_wrong(); !status.ok()) return status;
    if (Status status = exchange.end_turn(moved); !status.ok()) return status;
  }
  return {};
}

Status Combiner::run() {
  if (Status status = find_senders(); !status.ok()) return status;
  topk_weights_.resize(to_size(topology_.num_nodes()));
  if (call_.weighted) {
    if (Status status = exchange_topk_weights(); !status.ok()) return status;
  }
  const auto row_bytes = to_size(call_.x.row_bytes);
  const std::size_t record_bytes = (returns_weights() ? entries_bytes_ : 0) + checksum_bytes_;
  for (int node = 0; verifies() && node < topology_.num_nodes(); ++node) {
    sent_sums_.emplace_back(to_size(routing_.incoming[to_size(node)].num_items()), 0);
    received_sums_.emplace_back(to_size(routing_.outgoing[to_size(node)].num_items()), 0);
  }
  std::size_t capacity = rails_.chunk_capacity();
  // No slice may end inside a block, which is quantised as a whole.
  constexpr auto kBlockBytes = static_cast<std::size_t>(kQuantBlockSize) * sizeof(std::uint16_t);
  if (call_.wire_format == WireFormat::kFp8) capacity -= capacity % kBlockBytes;
  if (row_bytes + record_bytes <= capacity) {
    if (Status status = exchange_sums(ItemSlice::of(row_bytes, record_bytes, 0, capacity)); !status.ok()) return status;
  } else {
    for (std::size_t begin = 0; begin < row_bytes; begin += capacity) {
      if (Status status = exchange_sums(ItemSlice::of(row_bytes, 0, begin, capacity)); !status.ok()) return status;
    }
    if (record_bytes > 0) {
      // Send the weights and the checksum in a separate slice, so that no slice holds only a part of them.
      ItemSlice slice;
      slice.row_begin = slice.row_end = row_bytes;
      slice.record_end = record_bytes;
      if (Status status = exchange_sums(slice); !status.ok()) return status;
    }
  }
  sync_.post(Phase::kDone);
  return sync_.wait(Phase::kDone);
}

}  // namespace

Status combine(const CombineCall& call, const Context& context) { return run_call<Combiner>(call, context); }

}  // namespace ferry::cpu::internode
