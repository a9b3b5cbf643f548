/// Counts and forward tables, as route over several nodes receives them from all ranks (plan/peer_counts.hpp,
/// plan/forward_table.hpp and plan/route_plan.hpp): accepted tables name one token for every row that holds one,
/// whatever else was changed, and unchanged tables are accepted.
///
/// Input: shape of the group and of the call (7 x u8), tokens of each rank (u8) with their experts (u8 each), then the
/// number of changes (u8) and the changes.

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "fuzz_target.hpp"
#include "input_reader.hpp"
#include "plan/peer_counts.hpp"
#include "plan/route_plan.hpp"

namespace ferry::test {
namespace {

using plan::Destination;
using plan::ForwardTable;
using plan::ForwardTableSize;
using plan::PeerCounts;

constexpr int kNumNodes = 2;
constexpr int kMaxRanksPerNode = 2;
constexpr int kMaxExperts = 6;
constexpr int kMaxTopkHere = 4;
constexpr int kMaxTokens = 3;
constexpr int kMaxChanges = 4;
constexpr int kMaxRuns = std::max(kNumNodes * kMaxRanksPerNode, kMaxExperts);

/// Counts and table that one rank reports about its tokens.
struct Source {
  std::vector<std::vector<int>> tokens;  // experts of each token
  std::int64_t num_entries = 0;
  std::int64_t max_recv_rows = 0;
  std::vector<std::int32_t> rank_counts;
  std::vector<std::int32_t> expert_counts;
  std::vector<ForwardTableSize> sizes;  // by node
  std::vector<std::byte> table;         // for the node under test
};

struct World {
  Topology topology;
  RouteCall call;
  std::vector<std::int32_t> expert_to_rank;  ///< [E]
  int node = 0;                              // node whose ranks read the tables
  std::vector<Source> sources;

  int first_rank() const { return node * topology.ranks_per_node; }
  int owner(int expert) const { return expert_to_rank[to_size(expert)]; }
};

World draw_world(InputReader& reader) {
  World world;
  world.topology.ranks_per_node = 1 + reader.take<std::uint8_t>() % kMaxRanksPerNode;
  world.topology.num_ranks = kNumNodes * world.topology.ranks_per_node;
  world.node = reader.take<std::uint8_t>() % kNumNodes;
  RouteCall& call = world.call;
  call.num_topk = 1 + reader.take<std::uint8_t>() % kMaxTopkHere;
  RouteOptions& options = call.options;
  options.num_experts = 1 + reader.take<std::uint8_t>() % kMaxExperts;
  const std::uint8_t layout = reader.take<std::uint8_t>() % 3;
  options.layout = layout == 0 ? Layout::kTokens : layout == 1 ? Layout::kExperts : Layout::kSlab;
  const std::uint8_t space = reader.take<std::uint8_t>();
  options.expert_alignment = options.layout == Layout::kExperts ? 1 + space % 4 : 1;
  options.slab_capacity = options.layout == Layout::kSlab ? 1 + space % 32 : 0;
  const auto placement = reader.take<std::uint8_t>();
  for (int expert = 0; expert < options.num_experts; ++expert) {
    world.expert_to_rank.push_back((expert * (1 + placement % 5) + placement / 5) % world.topology.num_ranks);
  }
  for (int rank = 0; rank < world.topology.num_ranks; ++rank) {
    Source& source = world.sources.emplace_back();
    source.tokens.resize(reader.take<std::uint8_t>() % (kMaxTokens + 1));
    for (std::vector<int>& experts : source.tokens) {
      for (int topk = 0; topk < call.num_topk; ++topk) {
        experts.push_back(reader.take<std::uint8_t>() % (static_cast<int>(options.num_experts) + 1) - 1);
      }
    }
  }
  return world;
}

/// Computes correct counts from the definition, without the library's code.
void count(World& world) {
  for (Source& source : world.sources) {
    source.num_entries = static_cast<std::int64_t>(source.tokens.size()) * world.call.num_topk;
    source.rank_counts.assign(to_size(world.topology.num_ranks), 0);
    source.expert_counts.assign(to_size(world.call.options.num_experts), 0);
    source.sizes.assign(kNumNodes, ForwardTableSize());
    for (const std::vector<int>& experts : source.tokens) {
      std::array<bool, kMaxExperts> to_expert{};
      std::array<bool, kNumNodes * kMaxRanksPerNode> to_rank{};
      std::array<bool, kNumNodes> to_node{};
      for (const int expert : experts) {
        if (expert < 0) continue;
        const int rank = world.owner(expert);
        const auto node = to_size(world.topology.node_of(rank));
        if (!std::exchange(to_expert[to_size(expert)], true)) ++source.expert_counts[to_size(expert)];
        if (!std::exchange(to_rank[to_size(rank)], true)) ++source.rank_counts[to_size(rank)];
        if (!std::exchange(to_node[node], true)) ++source.sizes[node].num_items;
        ++source.sizes[node].num_destinations;
      }
    }
  }
}

/// Row of a source's next token in a run, by the definition of each layout.
class NextRows {
 public:
  explicit NextRows(const World& world) : world_(world) {
    std::vector<std::int32_t> next(to_size(world.topology.num_ranks), 0);
    for (int expert = 0; expert < world.call.options.num_experts; ++expert) {
      std::int32_t& first = next[to_size(world.owner(expert))];
      first_.push_back(first);
      std::int64_t rows = 0;
      for (const Source& source : world.sources) rows += source.expert_counts[to_size(expert)];
      const RouteOptions& options = world.call.options;
      while (rows % options.expert_alignment != 0) ++rows;
      first += static_cast<std::int32_t>(options.layout == Layout::kSlab ? options.slab_capacity : rows);
    }
  }
  std::int32_t next(int expert) {
    const bool by_rank = world_.call.options.layout == Layout::kTokens;
    const int run = by_rank ? world_.owner(expert) : expert;
    return (by_rank ? 0 : first_[to_size(expert)]) + num_taken_[to_size(run)]++;
  }

 private:
  const World& world_;
  std::vector<std::int32_t> first_;  // by expert
  std::array<std::int32_t, kMaxRuns> num_taken_{};
};

void make_tables(World& world) {
  NextRows rows(world);
  for (Source& source : world.sources) {
    ForwardTable table;
    for (std::size_t token = 0; token < source.tokens.size(); ++token) {
      std::array<std::int32_t, kMaxRuns> row_of_run;
      row_of_run.fill(-1);
      std::vector<Destination> destinations;
      for (std::size_t topk = 0; topk < source.tokens[token].size(); ++topk) {
        const int expert = source.tokens[token][topk];
        if (expert < 0) continue;
        const int run = world.call.options.layout == Layout::kTokens ? world.owner(expert) : expert;
        std::int32_t& row = row_of_run[to_size(run)];
        if (row < 0) row = rows.next(expert);
        if (world.topology.node_of(world.owner(expert)) != world.node) continue;
        const auto rank = static_cast<std::int16_t>(world.topology.rail_of(world.owner(expert)));
        destinations.push_back({row, rank, static_cast<std::uint8_t>(topk), 0});
      }
      if (destinations.empty()) continue;
      std::ranges::sort(destinations, {}, [](const Destination& p) { return std::tuple(p.rank, p.row, p.topk); });
      table.tokens.push_back(static_cast<std::int32_t>(token));
      table.destinations.insert(table.destinations.end(), destinations.begin(), destinations.end());
      table.first_destination.push_back(static_cast<std::int32_t>(table.destinations.size()));
    }
    source.table.resize(table.size().wire_bytes());
    plan::encode(table, source.table.data());
  }
}

/// Changes the report of one rank. Returns false if the report is unchanged.
bool change(InputReader& reader, World& world) {
  Source& source = world.sources[reader.take<std::uint8_t>() % world.sources.size()];
  const std::uint8_t what = reader.take<std::uint8_t>() % 8;
  const std::size_t where = reader.take<std::uint8_t>();
  const auto by = static_cast<std::int32_t>(reader.take<std::uint32_t>());
  const auto add = [by](std::int32_t& number) {
    number = static_cast<std::int32_t>(static_cast<std::uint32_t>(number) + static_cast<std::uint32_t>(by));
    return by != 0;
  };
  ForwardTableSize& size = source.sizes[where % source.sizes.size()];
  switch (what) {
    case 0:
      return add(source.rank_counts[where % source.rank_counts.size()]);
    case 1:
      return add(source.expert_counts[where % source.expert_counts.size()]);
    case 2:
      return add(size.num_items);
    case 3:
      return add(size.num_destinations);
    case 4:
      source.num_entries += by;
      return by != 0;
    default: {
      if (source.table.size() < 4) return false;
      std::byte* const word = source.table.data() + where % (source.table.size() / 4) * 4;
      std::int32_t number = 0;
      std::memcpy(&number, word, sizeof(number));
      const bool changed = add(number);
      std::memcpy(word, &number, sizeof(number));
      return changed;
    }
  }
}

/// Reads all reports on one rank of the node, as route does. Returns false if they were refused, or are too large for a
/// test.
bool read(World& world, int local_rank) {
  const int me = world.first_rank() + local_rank;
  const RouteCall& call = world.call;
  const auto refuse = [](const Status& status) {
    require_refusal(status, ErrorCode::kTransport);
    return false;
  };
  Topology topology = world.topology;
  topology.rank = me;
  const RouteOptions& options = call.options;
  const plan::RouteShape shape{.layout = options.layout,
                               .num_ranks = to_size(topology.num_ranks),
                               .num_experts = to_size(options.num_experts),
                               .num_topk = to_size(call.num_topk),
                               .expert_alignment = options.expert_alignment,
                               .slab_capacity = options.slab_capacity,
                               .expert_to_rank = world.expert_to_rank};
  const auto my_rank = to_size(me);
  std::vector<plan::SourceCounts> counts;
  for (Source& source : world.sources) {
    const PeerCounts peer{source.rank_counts.data(), source.expert_counts.data(), source.sizes.data(), 0};
    const Status status = plan::check_counts(peer, shape, topology, source.num_entries);
    if (!status.ok()) return refuse(status);
    counts.push_back(
        {source.rank_counts.data(), source.expert_counts.data(), source.num_entries, source.max_recv_rows});
    require(plan::counts_fit(shape, counts.back()), "possible counts do not exceed a rank's entries");
  }
  const plan::ExpertGroups groups = plan::group_experts(shape, counts);
  if (Status status = plan::check_capacity(shape, counts, groups); !status.ok()) {
    require_refusal(status, ErrorCode::kCapacity);
    return false;
  }
  // Larger tables would only test memory.
  constexpr std::int64_t kManyRows = 1 << 8;
  std::vector<std::int64_t> num_rows;
  for (int other = 0; other < topology.ranks_per_node; ++other) {
    num_rows.push_back(plan::rows_on_rank(shape, counts, groups, to_size(world.first_rank() + other)));
    if (num_rows.back() > kManyRows) return false;
  }
  for (const Source& source : world.sources) {
    if (source.sizes[to_size(world.node)].num_destinations > kManyRows) return false;
  }
  const auto num_used_rows = to_size(plan::rows_on_rank(shape, counts, groups, my_rank));
  std::vector<std::int32_t> source_table(num_used_rows * 2, -1);
  plan::for_each_received_run(
      shape, counts, groups, my_rank,
      [&](std::size_t /*run*/, std::size_t source, std::int64_t first_row, std::int32_t num_run_rows) {
        for (std::int64_t row = first_row; row < first_row + num_run_rows; ++row) {
          source_table[to_size(row) * 2] = static_cast<std::int32_t>(source);
        }
      });
  std::vector<std::int32_t> item_of_row(num_used_rows, -1);
  std::vector<bool> given(num_used_rows, false);
  std::vector<ForwardTable> tables;
  for (std::size_t rank = 0; rank < world.sources.size(); ++rank) {
    const Source& source = world.sources[rank];
    const ForwardTableSize size = source.sizes[to_size(world.node)];
    std::vector<std::byte> bytes = source.table;
    bytes.resize(size.wire_bytes());
    const std::int64_t num_tokens = source.num_entries / call.num_topk;
    Result<ForwardTable> table = plan::parse_forward_table(bytes, size, {num_tokens, call.num_topk, num_rows});
    if (!table.ok()) return refuse(table.status());
    // As in route: rail peers check tables from other nodes for all ranks of the node.
    const bool from_other_node = topology.node_of(static_cast<int>(rank)) != world.node;
    if (from_other_node) {
      std::vector<std::int64_t> counted;
      for (int other = 0; other < topology.ranks_per_node; ++other) {
        counted.push_back(plan::rows_from_source(shape, counts[rank], to_size(world.first_rank() + other)));
      }
      if (Status status = plan::check_num_rows(*table, counted); !status.ok()) return refuse(status);
    }
    const std::int64_t expected = plan::rows_from_source(shape, counts[rank], my_rank);
    if (expected > 0) {
      const Status status =
          plan::enter_table(*table, static_cast<int>(rank), local_rank, expected, {source_table, item_of_row});
      if (!status.ok()) return refuse(status);
    }
    for (const Destination& destination : table->destinations) {
      if (destination.rank == local_rank && destination.first != 0 && (from_other_node || expected > 0)) {
        require(source_table[to_size(destination.row) * 2] == static_cast<std::int32_t>(rank),
                "a rank assigns only its own rows");
        require(!given[to_size(destination.row)], "no row is given twice");
        given[to_size(destination.row)] = true;
      }
    }
    tables.push_back(std::move(*table));
  }
  std::vector<bool> holds_token(num_used_rows, options.layout == Layout::kTokens);
  for (std::size_t expert = 0; !shape.by_rank() && expert < shape.num_experts; ++expert) {
    if (shape.owner(expert) != my_rank) continue;
    std::fill_n(holds_token.begin() + groups.first_rows[expert], groups.num_rows[expert], true);
  }
  for (std::size_t row = 0; row < holds_token.size(); ++row) {
    const std::int32_t rank = source_table[row * 2];
    const std::int32_t token = source_table[row * 2 + 1];
    require(holds_token[row] == (rank >= 0) && holds_token[row] == (token >= 0),
            "rows that hold a token have a source");
    if (rank < 0) continue;
    const ForwardTable& table = tables[to_size(rank)];
    const std::int32_t item = item_of_row[row];
    require(item >= 0 && item < table.num_items() && table.tokens[to_size(item)] == token, "a row's item is its token");
    require(token < counts[to_size(rank)].num_entries / call.num_topk, "a row's token exists");
  }
  return true;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  InputReader reader(input);
  World world = draw_world(reader);
  count(world);
  make_tables(world);
  bool changed = false;
  const int num_changes = reader.take<std::uint8_t>() % (kMaxChanges + 1);
  for (int i = 0; i < num_changes; ++i) changed = change(reader, world) || changed;
  bool accepted = true;
  for (int rank = 0; rank < world.topology.ranks_per_node && accepted; ++rank) accepted = read(world, rank);
  const bool may_be_full = world.call.options.layout == Layout::kSlab;
  require(changed || may_be_full || accepted, "unchanged tables are accepted");
}

}  // namespace ferry::test
