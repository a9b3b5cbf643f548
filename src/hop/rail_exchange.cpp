#include "hop/rail_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace ferry::hop {

RailExchange::RailExchange(Rails& rails, std::vector<Flow> flows) : rails_(rails), states_(flows.size()) {
  for (std::size_t node = 0; node < flows.size(); ++node) states_[node].flow = flows[node];
  for (int step = 1; step < rails.num_nodes(); ++step) {
    const int node = (rails.node() + step) % rails.num_nodes();
    order_.push_back(node);
    State& state = states_[static_cast<std::size_t>(node)];
    state.exchange_idx = rails.next_exchange(node);
    state.in = ChunkReader({state.exchange_idx, state.flow.num_in, state.flow.in_item_bytes});
  }
}

bool RailExchange::send(const Write& write) {
  bool sent = false;
  for (const int node : order_) {
    State& state = states_[static_cast<std::size_t>(node)];
    const std::int64_t left = state.flow.num_out - state.num_sent;
    if (left == 0) continue;
    std::byte* const room = rails_.chunk_room(node);
    if (room == nullptr) continue;
    const auto most = static_cast<std::int64_t>(rails_.chunk_capacity() / state.flow.out_item_bytes);
    const std::int64_t count = std::min(left, most);
    write(node, state.num_sent, count, room);
    rails_.send_chunk(node, {.chunk_idx = 0,
                             .exchange_idx = state.exchange_idx,
                             .num_items = static_cast<std::uint32_t>(count),
                             .item_bytes = static_cast<std::uint32_t>(state.flow.out_item_bytes)});
    state.num_sent += count;
    sent = true;
  }
  return sent;
}

std::span<const std::byte> RailExchange::front(int node) {
  ChunkReader& in = states_[static_cast<std::size_t>(node)].in;
  if (!fault_.ok() || in.all_used()) return {};
  if (in.is_open()) return in.front();
  const std::byte* const chunk = rails_.front_chunk(node);
  if (chunk == nullptr) return {};
  const std::size_t chunk_bytes = plan::kChunkHeaderBytes + rails_.chunk_capacity();
  if (Status status = in.open({chunk, chunk_bytes}, rails_.front_chunk_idx(node)); !status.ok()) {
    const int rank = rails_.rank_of(node);
    fault_ = Status(status.code(), fmt::format("rank {} sent {}", rank, status.message()), rank);
  }
  return in.front();
}

void RailExchange::pop(int node, std::int64_t count) {
  if (states_[static_cast<std::size_t>(node)].in.pop(count)) rails_.release_chunk(node);
}

bool RailExchange::all_sent() const {
  return std::all_of(order_.begin(), order_.end(), [this](int node) {
    const State& state = states_[static_cast<std::size_t>(node)];
    return state.num_sent == state.flow.num_out;
  });
}

bool RailExchange::all_used() const {
  return std::all_of(order_.begin(), order_.end(),
                     [this](int node) { return states_[static_cast<std::size_t>(node)].in.all_used(); });
}

void RailExchange::list_missing(std::vector<int>* ranks) const {
  for (const int node : order_) {
    const State& state = states_[static_cast<std::size_t>(node)];
    if (state.num_sent < state.flow.num_out || !state.in.all_used()) {
      ranks->push_back(rails_.rank_of(node));
    }
  }
}

}  // namespace ferry::hop
