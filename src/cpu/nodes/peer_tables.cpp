#include "cpu/nodes/peer_tables.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ferry/exchange.hpp"
#include "plan/to_size.hpp"

namespace ferry::cpu::nodes {
namespace {

using hop::HopPlace;
using hop::HopTable;
using hop::HopTableSize;

Status wrong(std::string what) { return Status(ErrorCode::kTransport, std::move(what)); }

/// Each at most T, and all together at most T * K.
bool fits(std::span<const std::int32_t> counts, std::int64_t num_tokens, std::int64_t num_entries) {
  std::int64_t sum = 0;
  for (const std::int32_t count : counts) {
    if (count < 0 || count > num_tokens) return false;
    sum += count;
  }
  return sum <= num_entries;
}

}  // namespace

Counts Counts::at(std::byte* base, const Topology& topology, std::int64_t num_experts) {
  const auto num_ranks = to_size(topology.num_ranks);
  const std::size_t num_words = num_ranks + to_size(num_experts);
  Counts counts;
  auto* const words = reinterpret_cast<std::int32_t*>(base);
  if (base != nullptr) {
    counts.rank_counts = words;
    counts.expert_counts = words + num_ranks;
    counts.tables = reinterpret_cast<HopTableSize*>(words + num_words);
  }
  const std::size_t bytes = num_words * sizeof(std::int32_t) + to_size(topology.num_nodes()) * sizeof(HopTableSize);
  constexpr auto kGranuleBytes = static_cast<std::size_t>(kRowGranuleBytes);
  counts.wire_bytes = (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  return counts;
}

Status check_counts(const Counts& counts, const Topology& topology, std::int64_t num_experts, std::int64_t num_topk,
                    std::int64_t num_entries) {
  if (num_entries < 0 || num_entries > std::numeric_limits<std::int32_t>::max() || num_entries % num_topk != 0) {
    return wrong(fmt::format("routes {} entries, expected a multiple of K = {} in i32", num_entries, num_topk));
  }
  const std::int64_t num_tokens = num_entries / num_topk;
  bool possible = fits({counts.rank_counts, to_size(topology.num_ranks)}, num_tokens, num_entries) &&
                  fits({counts.expert_counts, to_size(num_experts)}, num_tokens, num_entries);
  std::int64_t num_places = 0;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    const HopTableSize& size = counts.tables[node];
    possible = possible && size.num_items >= 0 && size.num_items <= num_tokens && size.num_places >= size.num_items;
    num_places += size.num_places;
  }
  if (possible && num_places <= num_entries) return {};
  return wrong(fmt::format("published counts that its {} tokens of {} entries cannot have", num_tokens, num_topk));
}

Status check_num_rows(const HopTable& table, std::span<const std::int64_t> num_rows) {
  std::vector<std::int64_t> found(num_rows.size(), 0);
  for (const HopPlace& place : table.places) found[static_cast<std::size_t>(place.mate)] += place.first;
  const auto differ = std::mismatch(found.begin(), found.end(), num_rows.begin());
  if (differ.first == found.end()) return {};
  return wrong(fmt::format("sent a table with {} rows for rank {} of the node, but counted {}", *differ.first,
                           differ.first - found.begin(), *differ.second));
}

Status enter_table(const HopTable& table, int source_rank, int mate, std::int64_t num_rows, const RowSources& rows) {
  std::int64_t num_entered = 0;
  for (std::int64_t item = 0; item < table.num_items(); ++item) {
    for (const HopPlace& place : table.places_of(item)) {
      if (place.first == 0 || place.mate != mate) continue;
      const std::int32_t token = table.tokens[to_size(item)];
      std::int32_t* const source = rows.source_table.data() + std::ptrdiff_t{place.row} * 2;
      if (source[0] != source_rank || source[1] != -1) {
        return wrong(
            fmt::format("sent a table that gives token {} row {}, expected a row that is the rank's by its "
                        "counts and was not given yet",
                        token, place.row));
      }
      source[1] = token;
      rows.item_of_row[to_size(place.row)] = static_cast<std::int32_t>(item);
      ++num_entered;
    }
  }
  if (num_entered == num_rows) return {};
  return wrong(fmt::format("sent a table with {} rows, but counted {}", num_entered, num_rows));
}

}  // namespace ferry::cpu::nodes
