#include "plan/peer_counts.hpp"

#include <fmt/format.h>

#include <limits>
#include <span>

#include "ferry/exchange.hpp"

namespace ferry::plan {
namespace {

/// Whether each count is at most T, and their sum at most T * K.
bool fits(std::span<const std::int32_t> counts, std::int64_t num_tokens, std::int64_t num_entries) {
  std::int64_t sum = 0;
  for (const std::int32_t count : counts) {
    if (count < 0 || count > num_tokens) return false;
    sum += count;
  }
  return sum <= num_entries;
}

}  // namespace

PeerCounts PeerCounts::at(std::byte* base, const Topology& topology, std::int64_t num_experts) {
  const auto num_ranks = to_size(topology.num_ranks);
  const std::size_t num_words = num_ranks + to_size(num_experts);
  PeerCounts counts;
  auto* const words = reinterpret_cast<std::int32_t*>(base);
  if (base != nullptr) {
    counts.rank_counts = words;
    counts.expert_counts = words + num_ranks;
    counts.tables = reinterpret_cast<ForwardTableSize*>(words + num_words);
  }
  const std::size_t bytes = num_words * sizeof(std::int32_t) + to_size(topology.num_nodes()) * sizeof(ForwardTableSize);
  constexpr auto kAlignmentBytes = static_cast<std::size_t>(kRowGranuleBytes);
  counts.wire_bytes = (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  return counts;
}

Status check_counts(const PeerCounts& counts, const RouteShape& shape, const Topology& topology,
                    std::int64_t num_entries) {
  const auto num_topk = static_cast<std::int64_t>(shape.num_topk);
  if (num_entries < 0 || num_entries > std::numeric_limits<std::int32_t>::max() || num_entries % num_topk != 0) {
    return Status(ErrorCode::kTransport,
                  fmt::format("routes {} entries, expected a multiple of K = {} in i32", num_entries, num_topk));
  }
  const std::int64_t num_tokens = num_entries / num_topk;
  bool possible = fits({counts.rank_counts, shape.num_ranks}, num_tokens, num_entries) &&
                  fits({counts.expert_counts, shape.num_experts}, num_tokens, num_entries);
  std::int64_t num_destinations = 0;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    const ForwardTableSize& size = counts.tables[node];
    possible =
        possible && size.num_items >= 0 && size.num_items <= num_tokens && size.num_destinations >= size.num_items;
    num_destinations += size.num_destinations;
  }
  if (possible && num_destinations <= num_entries) return {};
  return Status(ErrorCode::kTransport,
                fmt::format("published impossible counts for its {} tokens of {} entries", num_tokens, num_topk));
}

}  // namespace ferry::plan
