#include "planning/load.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

namespace ferry::tools {

namespace {

constexpr std::int64_t kMostCountedTokens = std::int64_t{1} << 18;

Status refuse_routing(const std::string& message) { return {ErrorCode::kInvalidArgument, message}; }

/// Numbers of all ranks, by rank.
struct RankCounts {
  explicit RankCounts(int num_ranks)
      : sent(static_cast<std::size_t>(num_ranks)),
        held(sent),
        foreign(sent),
        rows(sent),
        taken(sent),
        given(sent),
        entries(sent) {}

  void add(const PlanShape& shape, int rank, const std::int64_t* ids);

  std::vector<std::int64_t> sent;     ///< items to other nodes
  std::vector<std::int64_t> held;     ///< items with an expert in its node
  std::vector<std::int64_t> foreign;  ///< of these, of other nodes
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> taken;  ///< rows out of memory of other ranks of its node
  std::vector<std::int64_t> given;  ///< rows that those take out of its memory
  std::vector<std::int64_t> entries;
};

std::size_t index_of(std::int64_t rank) { return static_cast<std::size_t>(rank); }

void RankCounts::add(const PlanShape& shape, int rank, const std::int64_t* ids) {
  std::vector<std::int64_t> owners;
  for (int k = 0; k < shape.num_topk; ++k) {
    if (ids[k] < 0) continue;
    owners.push_back(owner_of(ids[k], shape.num_experts, shape.num_ranks()));
    ++entries[index_of(owners.back())];
  }
  std::sort(owners.begin(), owners.end());
  owners.erase(std::unique(owners.begin(), owners.end()), owners.end());
  std::int64_t last_node = -1;
  for (const std::int64_t owner : owners) {
    const std::int64_t node = owner / shape.ranks_per_node;
    const std::int64_t forwarder = node * shape.ranks_per_node + rank % shape.ranks_per_node;
    if (node != last_node) {
      ++held[index_of(forwarder)];
      if (forwarder != rank) {
        ++sent[index_of(rank)];
        ++foreign[index_of(forwarder)];
      }
      last_node = node;
    }
    ++rows[index_of(owner)];
    if (forwarder != owner) {
      ++taken[index_of(owner)];
      ++given[index_of(forwarder)];
    }
  }
}

double largest(const std::vector<std::int64_t>& counts) {
  return static_cast<double>(*std::max_element(counts.begin(), counts.end()));
}

/// Relative to `expected`; 1 where there is nothing to expect.
double share_of(double counted, double expected) { return expected > 0 ? counted / expected : 1.0; }

}  // namespace

Result<PlanLoad> busiest_load(const PlanShape& shape, const std::string& routing, std::uint64_t seed) {
  static const std::map<std::string, RoutingKind> kinds = {{"zipf", RoutingKind::kZipf},
                                                           {"one-hot", RoutingKind::kOneHot}};
  constexpr std::string_view kTracePrefix = "trace:";
  if (routing == "random") return PlanLoad{};
  if (shape.node_limit > 0) {
    return refuse_routing(
        fmt::format("--node-limit with --routing {}: its ids are what they are; leave the limit out", routing));
  }
  const auto kind = kinds.find(routing);
  std::optional<Trace> trace;
  if (kind == kinds.end()) {
    if (!std::string_view(routing).starts_with(kTracePrefix)) {
      return refuse_routing(fmt::format("--routing {}: expected random, zipf, one-hot or trace:FILE", routing));
    }
    Result<Trace> read = read_trace(routing.substr(kTracePrefix.size()));
    if (!read) return read.status();
    trace = std::move(*read);
    if (trace->table.num_topk != shape.num_topk || trace->table.num_experts != shape.num_experts) {
      return refuse_routing(fmt::format(
          "--routing {}: the trace has {} of {} experts a token; give --topk {} --experts "
          "{}",
          routing, trace->table.num_topk, trace->table.num_experts, trace->table.num_topk, trace->table.num_experts));
    }
  }
  const std::int64_t num_tokens = std::clamp<std::int64_t>(kMostCountedTokens / shape.num_ranks(), 1, shape.num_tokens);
  RankCounts counts(shape.num_ranks());
  for (int rank = 0; rank < shape.num_ranks(); ++rank) {
    const RoutingTable table =
        trace ? slice_routing(trace->table, rank * num_tokens, num_tokens)
              : make_routing(kind->second, {num_tokens, shape.num_topk, shape.num_experts}, seed, rank);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      counts.add(shape, rank, table.topk_idx.data() + token * shape.num_topk);
    }
  }
  PlanShape even = shape;
  even.load = {};
  const Traffic expected = traffic_of(even, num_tokens, 1);
  PlanLoad load;
  load.items_sent = share_of(std::max(largest(counts.sent), largest(counts.foreign)), expected.items_sent);
  load.items_held = share_of(largest(counts.held), expected.items_held);
  load.rows_received = share_of(largest(counts.rows), expected.rows_received);
  load.rows_over_links = share_of(std::max(largest(counts.taken), largest(counts.given)), expected.rows_over_links);
  load.entries = share_of(largest(counts.entries), expected.entries);
  return load;
}

}  // namespace ferry::tools
