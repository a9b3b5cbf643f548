#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/combine_inputs.hpp"
#include "cpu/nodes/item_slices.hpp"
#include "cpu/nodes/nodes_routing.hpp"
#include "cpu/nodes/operations.hpp"
#include "cpu/row_sum.hpp"
#include "plan/to_size.hpp"

/// Combine over several nodes. A forwarder sums the rows that its node has for each token of its rail peers, and sends
/// one row per token back; a source sums its own node's rows, and then biases and nodes in ascending order. Weights of
/// a weighted sum go to the forwarders first.

namespace ferry::cpu::nodes {
namespace {

using hop::Flow;
using hop::HopPlace;
using hop::HopTable;
using node::Phase;
using node::Ticket;

class NodesCombiner {
 public:
  NodesCombiner(const CombineCall& call, const Means& means)
      : call_(call),
        means_(means),
        topology_(means.topology()),
        routing_(static_cast<const NodesRouting&>(*call.routing)),
        entries_bytes_((to_size(routing_.num_topk) * sizeof(float) + kGranuleBytes - 1) / kGranuleBytes *
                       kGranuleBytes) {}

  Status prepare(Ticket& ticket);
  Status run();

 private:
  /// Where a rank of this node has its rows and returned weights.
  struct Holder {
    const std::byte* rows = nullptr;
    std::int64_t stride_bytes = 0;
    const float* weights = nullptr;
  };

  int my_node() const { return means_.rails.node(); }
  bool returns_weights() const { return call_.weights.present(); }
  Status find_holders();
  Status exchange_topk_weights();
  Status exchange_sums(const ItemSlice& slice);
  /// Sum of this node's rows of an item; `topk_weights` [K] where the sum is weighted.
  void sum_item(std::span<const HopPlace> places, const float* topk_weights, const ItemSlice& slice, std::byte* to);
  /// The item's returned weights, summed over this node's rows.
  void sum_item_weights(std::span<const HopPlace> places, std::byte* to);
  void write_items(const ItemSlice& slice, int node, std::int64_t first, std::int64_t count, std::byte* to);
  bool finish_tokens(const ItemSlice& slice, hop::RailExchange& exchange);
  bool finish_token(const ItemSlice& slice, hop::RailExchange& exchange);
  void add_token_weights(std::span<const HopPlace> places, const float* node_weights, float* out) const;

  const CombineCall& call_;
  const Means& means_;
  const Topology& topology_;
  const NodesRouting& routing_;
  std::size_t entries_bytes_;    // K floats as they travel
  std::vector<Holder> holders_;  // by index in the node
  RowSumFunction sum_row_ = nullptr;
  std::vector<std::vector<float>> topk_weights_;  // by node: [items, entries_bytes_ / 4] of the sources there
  std::vector<std::byte> own_sum_;                // of the token being finished
  std::vector<float> entries_;                    // scratch of an item's returned weights
  std::vector<float> node_weights_;               // what a node returns for the token being finished
  std::vector<const std::byte*> rows_;            // scratch of a sum
  std::vector<float> weights_;
  std::int64_t next_token_ = 0;
  std::vector<std::int64_t> next_item_;  // by node: of its table, the first that is not finished
};

Status NodesCombiner::prepare(Ticket& ticket) {
  node::Crew& crew = means_.crew;
  const node::Location rows = crew.locate(call_.x.data, call_.x.num_rows, call_.x.row_bytes, call_.x.stride_bytes);
  bool reachable = true;
  for (int rank = crew.first_rank(); rank < crew.end_rank(); ++rank) {
    reachable = reachable && crew.reachable(rows, rank);
  }
  return publish_combine_inputs(call_, routing_, crew, means_.staging, reachable, ticket);
}

Status NodesCombiner::find_holders() {
  const node::Crew& crew = means_.crew;
  const std::int64_t weights_per_row = routing_.layout == Layout::kTokens ? routing_.num_topk : 1;
  for (int rank = crew.first_rank(); rank < crew.end_rank(); ++rank) {
    const Ticket& ticket = crew.ticket_of(rank);
    const std::int64_t num_rows = routing_.num_rows_on_rank[to_size(rank)];
    Holder holder;
    if (num_rows > 0) {
      holder.rows = crew.resolve(ticket.input, rank, {num_rows, call_.x.row_bytes});
      holder.stride_bytes = ticket.input.stride_bytes;
      if (returns_weights()) {
        const auto weights_bytes = num_rows * weights_per_row * static_cast<std::int64_t>(sizeof(float));
        holder.weights = reinterpret_cast<const float*>(crew.resolve(ticket.records, rank, {1, weights_bytes}));
      }
      if (holder.rows == nullptr || (returns_weights() && holder.weights == nullptr)) {
        return means_.crew.fail(
            ErrorCode::kInternal, rank,
            fmt::format("combine: rank {} named memory outside its arena; please report this bug", rank));
      }
    }
    holders_.push_back(holder);
  }
  return {};
}

Status NodesCombiner::exchange_topk_weights() {
  const std::size_t floats_per_item = entries_bytes_ / sizeof(float);
  std::vector<Flow> flows(to_size(topology_.num_nodes()));
  std::vector<std::size_t> num_read(flows.size(), 0);
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node == my_node()) continue;
    const std::int64_t num_in = routing_.incoming[to_size(node)].num_items();
    flows[to_size(node)] = {routing_.outgoing[to_size(node)].num_items(), num_in, entries_bytes_, entries_bytes_};
    topk_weights_[to_size(node)].resize(to_size(num_in) * floats_per_item);
  }
  hop::Collective::Items items;
  items.waiting_for = "to send its tokens' weights";
  items.write = [&](int node, std::int64_t first, std::int64_t count, std::byte* to) {
    const auto num_topk = to_size(routing_.num_topk);
    const auto* const table = static_cast<const float*>(call_.topk_weights.data);
    for (std::int64_t item = first; item < first + count; ++item, to += entries_bytes_) {
      const std::int32_t token = routing_.outgoing[to_size(node)].tokens[to_size(item)];
      std::memset(to, 0, entries_bytes_);
      std::memcpy(to, table + to_size(token) * num_topk, num_topk * sizeof(float));
    }
  };
  items.use = [&](hop::RailExchange& exchange) {
    bool used = false;
    for (int node = 0; node < topology_.num_nodes(); ++node) {
      if (node == my_node()) continue;
      const std::span<const std::byte> bytes = exchange.front(node);
      if (bytes.empty()) continue;
      std::memcpy(topk_weights_[to_size(node)].data() + num_read[to_size(node)], bytes.data(), bytes.size());
      num_read[to_size(node)] += bytes.size() / sizeof(float);
      exchange.pop(node, static_cast<std::int64_t>(bytes.size() / entries_bytes_));
      used = true;
    }
    return used;
  };
  return means_.collective.exchange(std::move(flows), items);
}

void NodesCombiner::sum_item(std::span<const HopPlace> places, const float* topk_weights, const ItemSlice& slice,
                             std::byte* to) {
  rows_.clear();
  weights_.clear();
  for (const HopPlace& place : places) {
    if (!call_.weighted && place.first == 0) continue;
    const Holder& holder = holders_[static_cast<std::size_t>(place.mate)];
    rows_.push_back(holder.rows + place.row * holder.stride_bytes + slice.row_begin);
    if (call_.weighted) weights_.push_back(topk_weights[place.topk]);
  }
  sum_row_({rows_.data(), call_.weighted ? weights_.data() : nullptr, rows_.size(), to, slice.row_bytes()});
}

void NodesCombiner::sum_item_weights(std::span<const HopPlace> places, std::byte* to) {
  const auto num_topk = to_size(routing_.num_topk);
  entries_.assign(entries_bytes_ / sizeof(float), 0.0F);
  for (const HopPlace& place : places) {
    const float* weights = holders_[static_cast<std::size_t>(place.mate)].weights;
    if (routing_.layout != Layout::kTokens) {
      entries_[place.topk] = weights[place.row];
    } else if (place.first != 0) {
      const float* row = weights + to_size(place.row) * num_topk;
      for (std::size_t topk = 0; topk < num_topk; ++topk) entries_[topk] += row[topk];
    }
  }
  std::memcpy(to, entries_.data(), entries_bytes_);
}

void NodesCombiner::write_items(const ItemSlice& slice, int node, std::int64_t first, std::int64_t count,
                                std::byte* to) {
  const HopTable& table = routing_.incoming[to_size(node)];
  const std::size_t floats_per_item = entries_bytes_ / sizeof(float);
  for (std::int64_t item = first; item < first + count; ++item, to += slice.bytes()) {
    const std::span<const HopPlace> places = table.places_of(item);
    if (slice.row_bytes() > 0) {
      const float* const weights =
          call_.weighted ? topk_weights_[to_size(node)].data() + to_size(item) * floats_per_item : nullptr;
      sum_item(places, weights, slice, to);
    }
    // No slice holds a part of them: see run().
    if (slice.beside_bytes() > 0) sum_item_weights(places, to + slice.row_bytes());
  }
}

void NodesCombiner::add_token_weights(std::span<const HopPlace> places, const float* node_weights, float* out) const {
  if (routing_.layout == Layout::kTokens) {
    for (std::size_t topk = 0; topk < to_size(routing_.num_topk); ++topk) out[topk] += node_weights[topk];
  } else {
    for (const HopPlace& place : places) out[place.topk] = node_weights[place.topk];
  }
}

/// Sums the next token if all nodes' rows of it are here. False: they are not, or there are no more tokens.
bool NodesCombiner::finish_token(const ItemSlice& slice, hop::RailExchange& exchange) {
  if (next_token_ == routing_.num_tokens) return false;
  const auto has_next = [this](int node) {
    const HopTable& table = routing_.outgoing[to_size(node)];
    const std::int64_t item = next_item_[to_size(node)];
    return item < table.num_items() && table.tokens[to_size(item)] == next_token_;
  };
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node != my_node() && has_next(node) && exchange.front(node).empty()) return false;
  }
  float* const out_weights = slice.beside_bytes() > 0
                                 ? static_cast<float*>(call_.out_weights.data) + next_token_ * routing_.num_topk
                                 : nullptr;
  if (out_weights != nullptr) std::fill_n(out_weights, routing_.num_topk, 0.0F);

  const HopTable& own = routing_.outgoing[to_size(my_node())];
  const float* const topk_weights =
      call_.weighted ? static_cast<const float*>(call_.topk_weights.data) + next_token_ * routing_.num_topk : nullptr;
  const bool own_node = has_next(my_node());
  const std::span<const HopPlace> own_places =
      own_node ? own.places_of(next_item_[to_size(my_node())]) : std::span<const HopPlace>();
  if (own_node) sum_item(own_places, topk_weights, slice, own_sum_.data());

  rows_.clear();
  for (const ConstRows& bias : call_.bias) {
    if (bias.present()) rows_.push_back(bias.row(next_token_) + slice.row_begin);
  }
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (!has_next(node)) continue;
    const std::byte* const item = node == my_node() ? own_sum_.data() : exchange.front(node).data();
    rows_.push_back(item);
    if (out_weights == nullptr) continue;
    if (node == my_node()) {
      sum_item_weights(own_places, reinterpret_cast<std::byte*>(node_weights_.data()));
    } else {
      std::memcpy(node_weights_.data(), item + slice.row_bytes(), entries_bytes_);
    }
    add_token_weights(routing_.outgoing[to_size(node)].places_of(next_item_[to_size(node)]), node_weights_.data(),
                      out_weights);
  }
  if (slice.row_bytes() > 0) {
    sum_row_({rows_.data(), nullptr, rows_.size(), call_.out_x.row(next_token_) + slice.row_begin, slice.row_bytes()});
  }
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (!has_next(node)) continue;
    if (node != my_node()) exchange.pop(node, 1);
    // Last: has_next looks at it.
    ++next_item_[to_size(node)];
  }
  ++next_token_;
  return true;
}

bool NodesCombiner::finish_tokens(const ItemSlice& slice, hop::RailExchange& exchange) {
  // Not more at a time than a chunk or two, so that the forwarding of others' sums goes on.
  constexpr int kTokensAtATime = 16;
  int num_finished = 0;
  while (num_finished < kTokensAtATime && finish_token(slice, exchange)) ++num_finished;
  return num_finished > 0;
}

Status NodesCombiner::exchange_sums(const ItemSlice& slice) {
  std::vector<Flow> flows(to_size(topology_.num_nodes()));
  for (int node = 0; node < topology_.num_nodes(); ++node) {
    if (node == my_node()) continue;
    flows[to_size(node)] = {routing_.incoming[to_size(node)].num_items(), routing_.outgoing[to_size(node)].num_items(),
                            slice.bytes(), slice.bytes()};
  }
  next_token_ = 0;
  next_item_.assign(flows.size(), 0);
  own_sum_.resize(slice.row_bytes());
  node_weights_.resize(entries_bytes_ / sizeof(float));
  hop::Collective::Items items;
  items.waiting_for = "to send its node's sums or make room for more";
  items.write = [&](int node, std::int64_t first, std::int64_t count, std::byte* to) {
    write_items(slice, node, first, count, to);
  };
  items.use = [&](hop::RailExchange& exchange) { return finish_tokens(slice, exchange); };
  return means_.collective.exchange(std::move(flows), items);
}

Status NodesCombiner::run() {
  if (Status status = find_holders(); !status.ok()) return status;
  sum_row_ = choose_row_sum(call_.x.dtype);
  topk_weights_.resize(to_size(topology_.num_nodes()));
  if (call_.weighted) {
    if (Status status = exchange_topk_weights(); !status.ok()) return status;
  }
  const auto row_bytes = to_size(call_.x.row_bytes);
  const std::size_t beside_bytes = returns_weights() ? entries_bytes_ : 0;
  const std::size_t capacity = means_.rails.chunk_capacity();
  if (row_bytes + beside_bytes <= capacity) {
    if (Status status = exchange_sums(ItemSlice::of(row_bytes, beside_bytes, 0, capacity)); !status.ok()) return status;
  } else {
    for (std::size_t begin = 0; begin < row_bytes; begin += capacity) {
      if (Status status = exchange_sums(ItemSlice::of(row_bytes, 0, begin, capacity)); !status.ok()) return status;
    }
    if (beside_bytes > 0) {
      // The weights by themselves, so that no slice holds a part of them.
      ItemSlice slice;
      slice.row_begin = slice.row_end = row_bytes;
      slice.beside_end = beside_bytes;
      if (Status status = exchange_sums(slice); !status.ok()) return status;
    }
  }
  means_.crew.post(Phase::kDone);
  return means_.crew.wait(Phase::kDone);
}

}  // namespace

Status combine(const CombineCall& call, const Means& means) {
  if (!means.crew.broken().ok()) return means.crew.broken();
  Ticket ticket;
  ticket.record = call.record;
  if (call.record.code != ErrorCode::kOk) return means.collective.begin(ticket);
  NodesCombiner combiner(call, means);
  if (Status status = combiner.prepare(ticket); !status.ok()) ticket.record.set_status(status);
  if (Status status = means.collective.begin(ticket); !status.ok()) return status;
  return combiner.run();
}

}  // namespace ferry::cpu::nodes
