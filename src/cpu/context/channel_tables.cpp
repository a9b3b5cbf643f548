#include "cpu/context/channel_tables.hpp"

#include <algorithm>
#include <vector>

#include "plan/slots.hpp"

namespace ferry::cpu {
namespace {

/// Running sums over ranks, from rank 0 on.
void write_rank_prefix(const CpuRouting& routing, std::size_t num_ranks, std::int32_t* out) {
  for (std::size_t at = 0; at < num_ranks * num_ranks; ++at) {
    out[at] = routing.rank_counts[at] + (at >= num_ranks ? out[at - num_ranks] : 0);
  }
}

/// Fills the tables of sent tokens in one pass over this rank's tokens.
void write_sent(const ChannelTablesCall& call, const CpuRouting& routing, std::size_t num_ranks) {
  const auto num_channels = to_size(call.num_channels);
  const std::int64_t per_channel = plan::tokens_per_channel(routing.num_tokens, call.num_channels);
  std::vector<std::int32_t> sent(num_ranks, 0);
  for (std::size_t channel = 0; channel < num_channels; ++channel) {
    const std::int64_t begin = std::min(routing.num_tokens, static_cast<std::int64_t>(channel) * per_channel);
    const std::int64_t end = std::min(routing.num_tokens, begin + per_channel);
    for (std::int64_t token = begin; token < end; ++token) {
      std::int32_t* index = call.send_index != nullptr ? call.send_index + to_size(token) * num_ranks : nullptr;
      if (index != nullptr) std::fill_n(index, num_ranks, -1);
      for (const plan::Destination& destination : routing.destinations_of(token)) {
        if (destination.first == 0) continue;
        const auto rank = to_size(destination.rank);
        if (index != nullptr) index[rank] = sent[rank];
        ++sent[rank];
      }
    }
    for (std::size_t rank = 0; call.send_channel_prefix != nullptr && rank < num_ranks; ++rank) {
      call.send_channel_prefix[rank * num_channels + channel] = sent[rank];
    }
  }
}

/// Fills the tables of received rows in one pass over them; they ascend by source rank and token.
void write_received(const ChannelTablesCall& call, const CpuRouting& routing, std::size_t num_ranks) {
  const auto num_channels = to_size(call.num_channels);
  std::size_t row = 0;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t per_channel = plan::tokens_per_channel(routing.num_tokens_of_rank[rank], call.num_channels);
    const std::size_t first = row;
    const std::size_t end = first + to_size(routing.num_rows_from_rank[rank]);
    for (std::size_t channel = 0; channel < num_channels; ++channel) {
      const std::int64_t begin = static_cast<std::int64_t>(channel) * per_channel;
      while (row < end && routing.source_table[row * 2 + 1] < begin) ++row;
      call.recv_channel_prefix[rank * num_channels + channel] = static_cast<std::int32_t>(row - first);
    }
    row = end;
  }
}

}  // namespace

void write_channel_tables(const ChannelTablesCall& call, const CpuRouting& routing) {
  const std::size_t num_ranks = routing.num_rows_from_rank.size();
  if (call.rank_prefix != nullptr) write_rank_prefix(routing, num_ranks, call.rank_prefix);
  if (call.send_channel_prefix != nullptr || call.send_index != nullptr) write_sent(call, routing, num_ranks);
  if (call.recv_channel_prefix != nullptr) write_received(call, routing, num_ranks);
  for (std::int64_t row = 0; call.source_token != nullptr && row < routing.num_recv_rows; ++row) {
    call.source_token[row] = row < routing.num_used_rows ? routing.source_table[to_size(row) * 2 + 1] : -1;
  }
}

}  // namespace ferry::cpu
