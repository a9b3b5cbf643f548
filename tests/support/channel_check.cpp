#include "support/channel_check.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "support/exchange_check.hpp"

namespace ferry::test {
namespace {

using Table = std::vector<std::int32_t>;

struct ExpectedTables {
  Table rank_prefix, send_prefix, recv_prefix, source_token, send_index;
};

std::size_t at(std::int64_t row, std::int64_t column, std::int64_t width) {
  return static_cast<std::size_t>(row * width + column);
}

/// Ranks of every token of every rank.
std::vector<std::vector<std::set<std::int32_t>>> ranks_of_tokens(const oracle::World& world) {
  const std::vector<std::int32_t> owners = oracle::expert_owners(world);
  std::vector<std::vector<std::set<std::int32_t>>> all;
  for (const oracle::RankTokens& tokens : world.ranks) {
    auto& ranks = all.emplace_back(static_cast<std::size_t>(tokens.num_tokens));
    for (std::size_t entry = 0; entry < tokens.topk_idx.size(); ++entry) {
      const std::int64_t expert = tokens.topk_idx[entry];
      if (expert < 0) continue;
      ranks[entry / static_cast<std::size_t>(world.num_topk)].insert(owners[static_cast<std::size_t>(expert)]);
    }
  }
  return all;
}

/// Channel of a token out of `num_tokens`.
std::int64_t channel_of(std::int64_t token, std::int64_t num_tokens, int num_channels) {
  return token / ((num_tokens + num_channels - 1) / num_channels);
}

/// Counts by (rank, channel), summed over the earlier channels (with `inclusive`, also over the channel itself).
Table prefix_of(const Table& counts, int num_ranks, int num_channels, bool inclusive) {
  Table prefix(counts.size());
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::int32_t sum = 0;
    for (int channel = 0; channel < num_channels; ++channel) {
      const std::size_t here = at(rank, channel, num_channels);
      prefix[here] = sum + (inclusive ? counts[here] : 0);
      sum += counts[here];
    }
  }
  return prefix;
}

ExpectedTables expected_tables(const PreparedCase& prepared, int me, int num_channels) {
  const int num_ranks = prepared.world.num_ranks;
  const auto all = ranks_of_tokens(prepared.world);
  ExpectedTables expected;
  Table sent(static_cast<std::size_t>(num_ranks * num_channels), 0);
  Table received(sent.size(), 0);
  for (int source = 0; source < num_ranks; ++source) {
    const std::int64_t num_tokens = prepared.num_tokens(source);
    Table counts(static_cast<std::size_t>(num_ranks), 0);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const auto& ranks = all[static_cast<std::size_t>(source)][static_cast<std::size_t>(token)];
      const std::int64_t channel = channel_of(token, num_tokens, num_channels);
      if (source == me) {
        for (int rank = 0; rank < num_ranks; ++rank) {
          const bool goes = ranks.contains(rank);
          expected.send_index.push_back(goes ? counts[static_cast<std::size_t>(rank)] : -1);
          if (goes) ++sent[at(rank, channel, num_channels)];
        }
      }
      for (const std::int32_t rank : ranks) ++counts[static_cast<std::size_t>(rank)];
      if (!ranks.contains(me)) continue;
      ++received[at(source, channel, num_channels)];
      expected.source_token.push_back(static_cast<std::int32_t>(token));
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::int32_t above = source > 0 ? expected.rank_prefix[at(source - 1, rank, num_ranks)] : 0;
      expected.rank_prefix.push_back(above + counts[static_cast<std::size_t>(rank)]);
    }
  }
  const oracle::RankRouting& routing = prepared.routings[static_cast<std::size_t>(me)];
  expected.source_token.resize(static_cast<std::size_t>(routing.num_recv_rows), -1);
  expected.send_prefix = prefix_of(sent, num_ranks, num_channels, true);
  expected.recv_prefix = prefix_of(received, num_ranks, num_channels, false);
  return expected;
}

/// An output of the expected size in memory of the group's kind.
class OutTable {
 public:
  OutTable(const Group& group, const Table& expected)
      : on_device_(uses_device(group)), memory_(on_device_, Table(expected.size(), -77)), expected_(expected) {}
  TensorView view(std::initializer_list<std::int64_t> shape) { return {memory_.data(), DType::kInt32, shape}; }
  bool matches() {
    const std::size_t num_bytes = expected_.size() * sizeof(std::int32_t);
    const Bytes seen = num_bytes > 0 ? read_memory(on_device_, memory_.data(), num_bytes) : Bytes();
    const auto* wanted = reinterpret_cast<const std::byte*>(expected_.data());
    return std::equal(seen.begin(), seen.end(), wanted, wanted + num_bytes);
  }

 private:
  bool on_device_;
  PlainMemory memory_;
  const Table& expected_;
};

/// All tables with their expected values.
struct OutTables {
  ExpectedTables expected;
  OutTable rank_prefix, send_prefix, recv_prefix, source_token, send_index;

  OutTables(const Group& group, ExpectedTables tables)
      : expected(std::move(tables)),
        rank_prefix(group, expected.rank_prefix),
        send_prefix(group, expected.send_prefix),
        recv_prefix(group, expected.recv_prefix),
        source_token(group, expected.source_token),
        send_index(group, expected.send_index) {}
  OutTables(const OutTables&) = delete;  // the tables point into `expected`
  OutTables& operator=(const OutTables&) = delete;

  ChannelTables views(std::int64_t num_ranks, std::int64_t num_channels) {
    const auto num_rows = static_cast<std::int64_t>(expected.source_token.size());
    const auto num_tokens = static_cast<std::int64_t>(expected.send_index.size()) / num_ranks;
    return {rank_prefix.view({num_ranks, num_ranks}), send_prefix.view({num_ranks, num_channels}),
            recv_prefix.view({num_ranks, num_channels}), source_token.view({num_rows}),
            send_index.view({num_tokens, num_ranks})};
  }

  void check(RankContext& context, const std::string& where) {
    context.expect(rank_prefix.matches(), where + "rank_prefix");
    context.expect(send_prefix.matches(), where + "send_channel_prefix");
    context.expect(recv_prefix.matches(), where + "recv_channel_prefix");
    context.expect(source_token.matches(), where + "source_token");
    context.expect(send_index.matches(), where + "send_index");
  }
};

ExpectedTables with_room(ExpectedTables expected, std::size_t num_rows) {
  expected.source_token.resize(num_rows, -1);
  return expected;
}

}  // namespace

void check_channel_tables(RankContext& context, Group& group, const Routing& routing, const PreparedCase& prepared,
                          int num_channels) {
  OutTables out(group, expected_tables(prepared, context.rank(), num_channels));
  const std::string where = prepared.spec.name + ": channel tables: ";
  const ChannelTables views = out.views(prepared.world.num_ranks, num_channels);
  const Status called = group.channel_tables(routing, num_channels, views, stream_of(group));
  if (context.expect_ok(finish(group, called), where)) out.check(context, where);
}

struct EarlyChannelTables::Tables {
  std::string where;
  std::int64_t num_ranks;
  int num_channels;
  OutTables out;
  bool asked = false;
};

EarlyChannelTables::EarlyChannelTables(const Group& group, const PreparedCase& prepared, int rank, int num_channels) {
  constexpr std::size_t kRowsOff = 3;
  ExpectedTables expected = expected_tables(prepared, rank, num_channels);
  const std::size_t num_rows = expected.source_token.size();
  const bool fewer = prepared.spec.world.seed % 2 == 1 && num_rows > kRowsOff;
  expected = with_room(std::move(expected), fewer ? num_rows - kRowsOff : num_rows + kRowsOff);
  tables_.reset(new Tables{prepared.spec.name + ": early channel tables: ", prepared.world.num_ranks, num_channels,
                           OutTables(group, std::move(expected))});
}

EarlyChannelTables::~EarlyChannelTables() = default;

std::function<EarlyTables()> EarlyChannelTables::while_waiting() {
  return [tables = tables_.get()] {
    tables->asked = true;
    return EarlyTables{tables->num_channels, tables->out.views(tables->num_ranks, tables->num_channels)};
  };
}

void EarlyChannelTables::check(RankContext& context) const {
  if (tables_->asked) tables_->out.check(context, tables_->where);
}

}  // namespace ferry::test
