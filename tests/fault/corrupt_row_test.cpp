#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fault/small_exchange.hpp"
#include "fault/small_latency_exchange.hpp"
#include "support/rank_runner.hpp"
#include "support/row_damage.hpp"

/// Groups with GroupOptions::verify: rows that are damaged on their way are found before the call returns, by an error
/// that names the hop.

namespace ferry::test {
namespace {

using cpu::CheckedPlace;
using Kind = RowDamage::Kind;

constexpr int kNumRanks = 4;
/// Row that tests damage; every rank receives more.
constexpr std::int64_t kRow = 2;
/// Rows of these exchanges have 1024 bytes, items between nodes 16 more.
constexpr std::size_t kRowBits = SmallExchange::kRowBytes * 8;

struct GroupShape {
  const char* name;
  RankKind kind;
  int ranks_per_node = kNumRanks;
  bool symmetric = false;
  bool masks = false;

  int num_nodes() const { return kNumRanks / ranks_per_node; }
};

void PrintTo(const GroupShape& shape, std::ostream* out) { *out << shape.name; }

std::string shape_name(const testing::TestParamInfo<GroupShape>& info) { return info.param.name; }

constexpr GroupShape kThreads{"threads", RankKind::kThreads};
constexpr GroupShape kProcesses{"processes", RankKind::kProcesses};
constexpr GroupShape kSymmetric{"symmetric", RankKind::kProcesses, kNumRanks, true};
constexpr GroupShape kNodes{"nodes", RankKind::kThreads, 2};

using Body = std::function<void(RankContext&, Group&)>;

class CorruptRow : public testing::TestWithParam<GroupShape> {
 protected:
  /// Runs `body` on each rank of a group that verifies rows.
  static void run(const Body& body) {
    run_ranks({GetParam().kind, kNumRanks}, [&body](RankContext& context) {
      GroupOptions options{.backend = "cpu", .ranks_per_node = GetParam().ranks_per_node};
      if (GetParam().num_nodes() > 1) options.transport = "loopback";
      options.mask_lost_ranks = GetParam().masks;
      options.verify = true;
      Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
      if (!context.expect_ok(group.status(), "create")) return;
      body(context, **group);
    });
  }

  /// Expects that the call broke the group, with `peer` at fault and the texts in the message.
  static void expect_found(RankContext& context, Group& group, const Status& status, int peer,
                           const std::vector<std::string>& texts) {
    if (!context.expect_code(status, ErrorCode::kDataCorrupt, "the call")) return;
    context.expect(status.peer() == peer, fmt::format("peer is {}, expected {}", status.peer(), peer));
    for (const std::string& text : texts) {
      context.expect(status.message().find(text) != std::string_view::npos,
                     fmt::format("\"{}\" is not in: {}", text, status.message()));
    }
    context.expect_code(SmallExchange(group, false).route(), ErrorCode::kDataCorrupt, "the next call");
  }
};

/// Source and token of a row, from the table of the rank that receives it.
std::pair<int, int> source_of(const Routing& routing, std::int64_t row) {
  const auto* table = static_cast<const std::int32_t*>(routing.source().data);
  return {table[row * 2], table[row * 2 + 1]};
}

/// Waits until all ranks have returned from their calls: until then they may write into each other's memory.
void meet(RankContext& context) {
  context.expect_ok(context.bootstrap()->all_gather({}, 60 * kNsPerSecond).status(), "meet");
}

/// Result of the combine of a pair of split calls, when all ranks have returned from it.
Status run_latency_pair(RankContext& context, Group& group, bool symmetric) {
  SmallLatencyExchange exchange(group, symmetric);
  context.expect_ok(exchange.send_dispatch(), "send");
  context.expect_ok(exchange.receive(), "receive");
  Status status = exchange.send_combine();
  if (status.ok()) status = exchange.receive();
  meet(context);
  return status;
}

class CorruptDispatch : public CorruptRow {};

TEST_P(CorruptDispatch, NamesTheRow) {
  static constexpr int kReceiver = 1;
  const std::vector<std::pair<Kind, std::size_t>> damages = {{Kind::kFlippedBit, 0},
                                                             {Kind::kFlippedBit, kRowBits / 2 + 7},
                                                             {Kind::kFlippedBit, kRowBits - 1},
                                                             {Kind::kSwappedWords, kRowBits / 2},
                                                             {Kind::kZeros, 0}};
  for (const auto& [kind, bit_idx] : damages) {
    const RowDamage damage({CheckedPlace::kFinalRow, kReceiver, kRow}, kind, bit_idx);
    run([](RankContext& context, Group& group) {
      SmallExchange exchange(group, GetParam().symmetric);
      context.expect_ok(exchange.route(), "route");
      const Status status = exchange.dispatch();
      meet(context);
      if (context.rank() != kReceiver) {
        context.expect_code(status, ErrorCode::kDataCorrupt, "dispatch");
        return;
      }
      const auto [source, token] = source_of(exchange.routing(), kRow);
      expect_found(context, group, status, source,
                   {"dispatch (call 2)", fmt::format("row {} (token {} of rank {})", kRow, token, source),
                    fmt::format("hop rank {} -> rank {};", source, kReceiver),
                    fmt::format("1 of {} rows", exchange.routing().num_used_rows())});
    });
  }
}

TEST_P(CorruptDispatch, CountsTheRows) {
  static constexpr int kReceiver = 3;
  const RowDamage damage({CheckedPlace::kFinalRow, kReceiver}, Kind::kFlippedBit, 77);
  run([](RankContext& context, Group& group) {
    SmallExchange exchange(group, GetParam().symmetric);
    context.expect_ok(exchange.route(), "route");
    const Status status = exchange.dispatch();
    meet(context);
    if (context.rank() != kReceiver) return;
    const auto num_rows = exchange.routing().num_used_rows();
    expect_found(context, group, status, source_of(exchange.routing(), 0).first,
                 {"row 0 (", fmt::format("{} of {} rows", num_rows, num_rows)});
  });
}

INSTANTIATE_TEST_SUITE_P(OneNode, CorruptDispatch, testing::Values(kThreads, kProcesses, kSymmetric), shape_name);

class CorruptCombine : public CorruptRow {};

TEST_P(CorruptCombine, NamesTheHolder) {
  static constexpr int kReader = 2;
  for (const Kind kind : {Kind::kFlippedBit, Kind::kSwappedWords, Kind::kZeros}) {
    const RowDamage damage({CheckedPlace::kHeldRow, kReader}, kind, 2 * 64);
    run([](RankContext& context, Group& group) {
      SmallExchange exchange(group, GetParam().symmetric);
      context.expect_ok(exchange.route(), "route");
      context.expect_ok(exchange.dispatch(), "dispatch");
      const Status status = exchange.combine();
      meet(context);
      context.expect_code(status, ErrorCode::kDataCorrupt, "combine");
      if (context.rank() != kReader) return;
      expect_found(context, group, status, status.peer(),
                   {"combine (call 3)", fmt::format(" of rank {} is not as it was sent", status.peer()),
                    fmt::format("hop rank {} -> rank {};", status.peer(), kReader)});
    });
  }
}

INSTANTIATE_TEST_SUITE_P(OneNode, CorruptCombine, testing::Values(kThreads, kProcesses, kSymmetric), shape_name);

class CorruptLatency : public CorruptRow {};

TEST_P(CorruptLatency, DispatchNamesTheHop) {
  static constexpr int kReceiver = 1;
  const RowDamage damage({CheckedPlace::kFinalRow, kReceiver, kRow}, Kind::kFlippedBit, 5);
  run([](RankContext& context, Group& group) {
    SmallLatencyExchange exchange(group, GetParam().symmetric);
    context.expect_ok(exchange.send_dispatch(), "send");
    const Status status = exchange.receive();
    meet(context);
    if (context.rank() != kReceiver) return;
    expect_found(context, group, status, status.peer(),
                 {"latency_dispatch", fmt::format("row {} (token ", kRow),
                  fmt::format("hop rank {} -> rank {};", status.peer(), kReceiver)});
  });
}

TEST_P(CorruptLatency, CombineNamesTheHop) {
  static constexpr int kReader = 0;
  const RowDamage damage({CheckedPlace::kHeldRow, kReader}, Kind::kZeros);
  run([](RankContext& context, Group& group) {
    const Status status = run_latency_pair(context, group, GetParam().symmetric);
    if (context.rank() != kReader) return;
    expect_found(context, group, status, status.peer(),
                 {"latency_combine", fmt::format("hop rank {} -> rank {};", status.peer(), kReader)});
  });
}

INSTANTIATE_TEST_SUITE_P(OneNode, CorruptLatency,
                         testing::Values(kThreads, kSymmetric,
                                         GroupShape{"masks", RankKind::kThreads, kNumRanks, false, true}),
                         shape_name);

class CorruptOverNodes : public CorruptRow {
 protected:
  /// Runs a damaged route, dispatch and combine; `expect` gets the first error on the rank that found the damage.
  template <typename Expect>
  static void run_damaged(int finder, Expect expect) {
    run([&](RankContext& context, Group& group) {
      SmallExchange exchange(group, GetParam().symmetric);
      context.expect_ok(exchange.route(), "route");
      Status status = exchange.dispatch();
      if (status.ok()) status = exchange.combine();
      meet(context);
      if (context.rank() == finder) expect(context, group, status);
    });
  }
};

TEST_P(CorruptOverNodes, ForwarderNamesTheSource) {
  static constexpr int kForwarder = 1;  // forwards what rank 3 sends to its node
  const RowDamage damage({CheckedPlace::kRing, kForwarder, kRow}, Kind::kFlippedBit, kRowBits - 1);
  run_damaged(kForwarder, [](RankContext& context, Group& group, const Status& status) {
    expect_found(context, group, status, 3,
                 {"dispatch (call 2)", fmt::format("item {} (token ", kRow), " of rank 3)",
                  "hop rank 3 -> forwarder rank 1;", "1 of "});
  });
}

TEST_P(CorruptOverNodes, ForwarderFindsADamagedRecord) {
  static constexpr int kForwarder = 1;
  const RowDamage damage({CheckedPlace::kRing, kForwarder, kRow}, Kind::kFlippedBit, kRowBits + 3);
  run_damaged(kForwarder, [](RankContext& context, Group& group, const Status& status) {
    expect_found(context, group, status, 3, {"hop rank 3 -> forwarder rank 1;"});
  });
}

TEST_P(CorruptOverNodes, ReceiverNamesTheForwarder) {
  static constexpr int kReceiver = 1;
  // Rows are ordered by source: the last ones are from the other node.
  for (const std::int64_t row : {std::int64_t{0}, std::int64_t{140}}) {
    const RowDamage damage({CheckedPlace::kFinalRow, kReceiver, row}, Kind::kFlippedBit, 12);
    run([&](RankContext& context, Group& group) {
      SmallExchange exchange(group, GetParam().symmetric);
      context.expect_ok(exchange.route(), "route");
      const Status status = exchange.dispatch();
      meet(context);
      if (context.rank() != kReceiver) return;
      const auto [source, token] = source_of(exchange.routing(), row);
      context.expect((source >= 2) == (row != 0), fmt::format("row {} is from rank {}", row, source));
      const int sender = source >= 2 ? source - 2 : source;
      const std::string hop = sender == source
                                  ? fmt::format("hop rank {} -> rank 1;", source)
                                  : fmt::format("hop rank {} -> forwarder rank {} -> rank 1, after", source, sender);
      expect_found(context, group, status, sender,
                   {fmt::format("row {} (token {} of rank {})", row, token, source), hop});
    });
  }
}

TEST_P(CorruptOverNodes, HeldRowNamesTheHolder) {
  static constexpr int kReader = 0;
  const RowDamage damage({CheckedPlace::kHeldRow, kReader, kRow}, Kind::kFlippedBit, 12);
  run_damaged(kReader, [](RankContext& context, Group& group, const Status& status) {
    context.expect(status.peer() == 0 || status.peer() == 1, "a rank of the reader's node holds the row");
    expect_found(context, group, status, status.peer(),
                 {"combine (call 3)", fmt::format("row {} of rank {}", kRow, status.peer()),
                  fmt::format("hop rank {} -> rank 0;", status.peer())});
  });
}

TEST_P(CorruptOverNodes, SumNamesTheForwarder) {
  static constexpr int kReader = 2;
  for (const std::size_t bit_idx : {std::size_t{9}, kRowBits - 1, kRowBits + 1}) {
    const RowDamage damage({CheckedPlace::kNodeSum, kReader, kRow}, Kind::kFlippedBit, bit_idx);
    run_damaged(kReader, [](RankContext& context, Group& group, const Status& status) {
      expect_found(
          context, group, status, 0,
          {"combine (call 3)", fmt::format("sum {} of node 0 (token ", kRow), "hop forwarder rank 0 -> rank 2;"});
    });
  }
}

TEST_P(CorruptOverNodes, WeightsNameTheSource) {
  static constexpr int kForwarder = 0;
  const RowDamage damage({CheckedPlace::kWeights, kForwarder, kRow}, Kind::kFlippedBit, 3);
  run([](RankContext& context, Group& group) {
    const Status status = run_latency_pair(context, group, GetParam().symmetric);
    if (context.rank() != kForwarder) return;
    expect_found(context, group, status, 2,
                 {"latency_combine", "the weights of token ", "hop rank 2 -> forwarder rank 0;"});
  });
}

INSTANTIATE_TEST_SUITE_P(Nodes, CorruptOverNodes, testing::Values(kNodes), shape_name);

TEST(VerifyOption, MustBeEqualOnAllRanks) {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.verify = context.rank() == 0;
    const Status status = Group::create(context.bootstrap(), options).status();
    if (!context.expect_code(status, ErrorCode::kInvalidArgument, "create")) return;
    context.expect(status.message().find("rank 0 has verify=true, rank 1 has verify=false") != std::string_view::npos,
                   status.message());
  });
}

}  // namespace
}  // namespace ferry::test
