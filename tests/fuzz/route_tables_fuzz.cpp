/// Counts and tables of hops, as route over several nodes gets them from all ranks (cpu/nodes/peer_tables.hpp and the
/// router's arithmetic): what is accepted names one token for every row that holds one, whatever else was changed, and
/// what nobody changed is accepted.
///
/// Input: shape of the group and of the call (7 x u8), tokens of each rank (u8) with their experts (u8 each), then how
/// many changes there are (u8) and what they are.

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/nodes/peer_tables.hpp"
#include "cpu/router.hpp"
#include "fuzz_target.hpp"
#include "input_reader.hpp"

namespace ferry::test {
namespace {

using namespace cpu::nodes;
using hop::HopPlace;
using hop::HopTable;
using hop::HopTableSize;

constexpr int kNumNodes = 2;
constexpr int kMaxMates = 2;
constexpr int kMaxExperts = 6;
constexpr int kMaxTopkHere = 4;
constexpr int kMaxTokens = 3;
constexpr int kMaxChanges = 4;
constexpr int kMaxRuns = std::max(kNumNodes * kMaxMates, kMaxExperts);

std::size_t to_size(std::int64_t value) { return static_cast<std::size_t>(value); }

/// What one rank says of its tokens.
struct Source {
  std::vector<std::vector<int>> tokens;  // experts of each
  std::int64_t num_entries = 0;
  std::int64_t max_recv_rows = 0;
  std::vector<std::int32_t> rank_counts;
  std::vector<std::int32_t> expert_counts;
  std::vector<HopTableSize> sizes;  // by node
  std::vector<std::byte> table;     // for the node that is looked at
};

struct World {
  Topology topology;
  RouteCall call;
  int node = 0;  // whose ranks read the tables
  std::vector<Source> sources;

  int first_rank() const { return node * topology.ranks_per_node; }
  int owner(int expert) const { return call.expert_to_rank[to_size(expert)]; }
};

World draw_world(InputReader& reader) {
  World world;
  world.topology.ranks_per_node = 1 + reader.take<std::uint8_t>() % kMaxMates;
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
    call.expert_to_rank.push_back((expert * (1 + placement % 5) + placement / 5) % world.topology.num_ranks);
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

/// Honest counts, by definition and not by the router.
void count(World& world) {
  for (Source& source : world.sources) {
    source.num_entries = static_cast<std::int64_t>(source.tokens.size()) * world.call.num_topk;
    source.rank_counts.assign(to_size(world.topology.num_ranks), 0);
    source.expert_counts.assign(to_size(world.call.options.num_experts), 0);
    source.sizes.assign(kNumNodes, HopTableSize());
    for (const std::vector<int>& experts : source.tokens) {
      std::array<bool, kMaxExperts> to_expert{};
      std::array<bool, kNumNodes * kMaxMates> to_rank{};
      std::array<bool, kNumNodes> to_node{};
      for (const int expert : experts) {
        if (expert < 0) continue;
        const int rank = world.owner(expert);
        const auto node = to_size(world.topology.node_of(rank));
        if (!std::exchange(to_expert[to_size(expert)], true)) ++source.expert_counts[to_size(expert)];
        if (!std::exchange(to_rank[to_size(rank)], true)) ++source.rank_counts[to_size(rank)];
        if (!std::exchange(to_node[node], true)) ++source.sizes[node].num_items;
        ++source.sizes[node].num_places;
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
    HopTable table;
    for (std::size_t token = 0; token < source.tokens.size(); ++token) {
      std::array<std::int32_t, kMaxRuns> row_of_run;
      row_of_run.fill(-1);
      std::vector<HopPlace> places;
      for (std::size_t topk = 0; topk < source.tokens[token].size(); ++topk) {
        const int expert = source.tokens[token][topk];
        if (expert < 0) continue;
        const int run = world.call.options.layout == Layout::kTokens ? world.owner(expert) : expert;
        std::int32_t& row = row_of_run[to_size(run)];
        if (row < 0) row = rows.next(expert);
        if (world.topology.node_of(world.owner(expert)) != world.node) continue;
        const auto mate = static_cast<std::int16_t>(world.topology.rail_of(world.owner(expert)));
        places.push_back({row, mate, static_cast<std::uint8_t>(topk), 0});
      }
      if (places.empty()) continue;
      std::ranges::sort(places, {}, [](const HopPlace& p) { return std::tuple(p.mate, p.row, p.topk); });
      table.tokens.push_back(static_cast<std::int32_t>(token));
      table.places.insert(table.places.end(), places.begin(), places.end());
      table.first_place.push_back(static_cast<std::int32_t>(table.places.size()));
    }
    source.table.resize(table.size().wire_bytes());
    hop::encode(table, source.table.data());
  }
}

/// Changes what a rank says. False where that left everything as it was.
bool change(InputReader& reader, World& world) {
  Source& source = world.sources[reader.take<std::uint8_t>() % world.sources.size()];
  const std::uint8_t what = reader.take<std::uint8_t>() % 8;
  const std::size_t where = reader.take<std::uint8_t>();
  const auto by = static_cast<std::int32_t>(reader.take<std::uint32_t>());
  const auto add = [by](std::int32_t& number) {
    number = static_cast<std::int32_t>(static_cast<std::uint32_t>(number) + static_cast<std::uint32_t>(by));
    return by != 0;
  };
  HopTableSize& size = source.sizes[where % source.sizes.size()];
  switch (what) {
    case 0:
      return add(source.rank_counts[where % source.rank_counts.size()]);
    case 1:
      return add(source.expert_counts[where % source.expert_counts.size()]);
    case 2:
      return add(size.num_items);
    case 3:
      return add(size.num_places);
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

/// One rank of the node reads everything, as route does. False: it was refused, or is too much for a test.
bool read(World& world, int mate) {
  const int me = world.first_rank() + mate;
  const RouteCall& call = world.call;
  const auto refuse = [](const Status& status) {
    require_refusal(status, ErrorCode::kTransport);
    return false;
  };
  Topology topology = world.topology;
  topology.rank = me;
  const auto state = std::make_shared<cpu::CpuRouting>();
  cpu::Router router(call, topology, state);
  for (Source& source : world.sources) {
    const Counts counts{source.rank_counts.data(), source.expert_counts.data(), source.sizes.data(), 0};
    const Status status = check_counts(counts, topology, call.options.num_experts, call.num_topk, source.num_entries);
    if (!status.ok()) return refuse(status);
    require(router.add_source(
                {source.rank_counts.data(), source.expert_counts.data(), source.num_entries, source.max_recv_rows}),
            "what is possible does not exceed a rank's entries");
  }
  router.sum_sources();
  if (Status status = router.check_capacity(); !status.ok()) {
    require_refusal(status, ErrorCode::kCapacity);
    return false;
  }
  // Anything larger is a matter of memory.
  constexpr std::int64_t kManyRows = 1 << 8;
  std::vector<std::int64_t> num_rows;
  for (int other = 0; other < topology.ranks_per_node; ++other) {
    num_rows.push_back(router.rows_of(to_size(world.first_rank() + other)));
    if (num_rows.back() > kManyRows) return false;
  }
  for (const Source& source : world.sources) {
    if (source.sizes[to_size(world.node)].num_places > kManyRows) return false;
  }
  router.begin_sources();
  router.name_sources();
  std::vector<std::int32_t> item_of_row(to_size(state->num_used_rows), -1);
  std::vector<bool> given(to_size(state->num_used_rows), false);
  std::vector<HopTable> tables;
  for (std::size_t rank = 0; rank < world.sources.size(); ++rank) {
    const Source& source = world.sources[rank];
    const HopTableSize size = source.sizes[to_size(world.node)];
    std::vector<std::byte> bytes = source.table;
    bytes.resize(size.wire_bytes());
    Result<HopTable> table =
        hop::parse_hop_table(bytes, size, {state->num_tokens_of_rank[rank], call.num_topk, num_rows});
    if (!table.ok()) return refuse(table.status());
    // As in route: rail peers check what comes from other nodes, for all ranks of the node.
    const bool from_other_node = topology.node_of(static_cast<int>(rank)) != world.node;
    if (from_other_node) {
      std::vector<std::int64_t> counted;
      for (int other = 0; other < topology.ranks_per_node; ++other) {
        counted.push_back(router.rows_between(rank, to_size(world.first_rank() + other)));
      }
      if (Status status = check_num_rows(*table, counted); !status.ok()) return refuse(status);
    }
    const std::int64_t expected = state->num_rows_from_rank[rank];
    if (expected > 0) {
      const Status status =
          enter_table(*table, static_cast<int>(rank), mate, expected, {state->source_table, item_of_row});
      if (!status.ok()) return refuse(status);
    }
    for (const HopPlace& place : table->places) {
      if (place.mate == mate && place.first != 0 && (from_other_node || expected > 0)) {
        require(state->source_table[to_size(place.row) * 2] == static_cast<std::int32_t>(rank),
                "a rank gives none but its own rows");
        require(!given[to_size(place.row)], "no row is given twice");
        given[to_size(place.row)] = true;
      }
    }
    tables.push_back(std::move(*table));
  }
  router.finish();
  std::vector<bool> holds_token(to_size(state->num_used_rows), call.options.layout == Layout::kTokens);
  for (std::size_t local = 0; call.options.layout != Layout::kTokens && local < state->local_expert_ids.size();
       ++local) {
    const auto begin = holds_token.begin() + state->expert_row_offsets[local];
    std::fill_n(begin, state->num_rows_per_local_expert[local], true);
  }
  for (std::size_t row = 0; row < holds_token.size(); ++row) {
    const std::int32_t rank = state->source_table[row * 2];
    const std::int32_t token = state->source_table[row * 2 + 1];
    require(holds_token[row] == (rank >= 0) && holds_token[row] == (token >= 0),
            "rows that hold a token have a source");
    if (rank < 0) continue;
    const HopTable& table = tables[to_size(rank)];
    const std::int32_t item = item_of_row[row];
    require(item >= 0 && item < table.num_items() && table.tokens[to_size(item)] == token, "a row's item is its token");
    require(token < state->num_tokens_of_rank[to_size(rank)], "a row's token exists");
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
  for (int mate = 0; mate < world.topology.ranks_per_node && accepted; ++mate) accepted = read(world, mate);
  const bool may_be_full = world.call.options.layout == Layout::kSlab;
  require(changed || may_be_full || accepted, "what nobody changed is accepted");
}

}  // namespace ferry::test
