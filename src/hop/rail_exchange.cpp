#include "hop/rail_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace ferry::hop {

RailExchange::RailExchange(Rails& rails, std::vector<Flow> flows) : rails_(rails), states_(flows.size()) {
  for (std::size_t node = 0; node < flows.size(); ++node) states_[node].flow = flows[node];
  for (int step = 1; step < rails.num_nodes(); ++step) {
    const int node = (rails.node() + step) % rails.num_nodes();
    order_.push_back(node);
    states_[static_cast<std::size_t>(node)].exchange_idx = rails.next_exchange(node);
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

/// Looks at the header of the front chunk, if there is one.
bool RailExchange::open_chunk(int node, State& state) {
  const std::byte* const chunk = rails_.front_chunk(node);
  if (chunk == nullptr) return false;
  layout::ChunkHeader header;
  std::memcpy(&header, chunk, sizeof(header));
  const std::int64_t left = state.flow.num_in - state.num_used;
  const std::size_t item_bytes = state.flow.in_item_bytes;
  const bool fits = header.num_items > 0 && static_cast<std::int64_t>(header.num_items) <= left &&
                    header.num_items * item_bytes <= rails_.chunk_capacity();
  if (header.chunk_idx == rails_.front_chunk_idx(node) && header.exchange_idx == state.exchange_idx &&
      header.item_bytes == item_bytes && fits) {
    state.chunk_items = header.num_items;
    state.chunk_used = 0;
    return true;
  }
  fault_ =
      Status(ErrorCode::kTransport,
             fmt::format("rank {} sent a chunk that was not agreed on: number {} of exchange {} with {} items of {} "
                         "bytes, expected number {} of exchange {} with at most {} items of {} bytes",
                         rails_.rank_of(node), header.chunk_idx, header.exchange_idx, header.num_items,
                         header.item_bytes, rails_.front_chunk_idx(node), state.exchange_idx, left, item_bytes),
             rails_.rank_of(node));
  return false;
}

std::span<const std::byte> RailExchange::front(int node) {
  State& state = states_[static_cast<std::size_t>(node)];
  if (!fault_.ok() || state.num_used == state.flow.num_in) return {};
  if (state.chunk_items == 0 && !open_chunk(node, state)) return {};
  const std::byte* const items = rails_.front_chunk(node) + layout::kChunkHeaderBytes;
  const std::size_t item_bytes = state.flow.in_item_bytes;
  return {items + static_cast<std::size_t>(state.chunk_used) * item_bytes,
          static_cast<std::size_t>(state.chunk_items - state.chunk_used) * item_bytes};
}

void RailExchange::pop(int node, std::int64_t count) {
  State& state = states_[static_cast<std::size_t>(node)];
  state.num_used += count;
  state.chunk_used += count;
  if (state.chunk_used < state.chunk_items) return;
  state.chunk_items = 0;
  rails_.release_chunk(node);
}

bool RailExchange::all_sent() const {
  return std::all_of(order_.begin(), order_.end(), [this](int node) {
    const State& state = states_[static_cast<std::size_t>(node)];
    return state.num_sent == state.flow.num_out;
  });
}

bool RailExchange::all_used() const {
  return std::all_of(order_.begin(), order_.end(), [this](int node) {
    const State& state = states_[static_cast<std::size_t>(node)];
    return state.num_used == state.flow.num_in;
  });
}

void RailExchange::list_missing(std::vector<int>* ranks) const {
  for (const int node : order_) {
    const State& state = states_[static_cast<std::size_t>(node)];
    if (state.num_sent < state.flow.num_out || state.num_used < state.flow.num_in) {
      ranks->push_back(rails_.rank_of(node));
    }
  }
}

}  // namespace ferry::hop
