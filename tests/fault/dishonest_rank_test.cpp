/// A rank of another node that follows the form of the protocol but sends false contents: the receiving rank refuses
/// impossible data and names the sender before it uses any of it to address memory.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "call/exchange.hpp"
#include "core/create_together.hpp"
#include "core/group_options.hpp"
#include "plan/peer_counts.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

using plan::ForwardTable;
using plan::PeerCounts;
using rail::CallHeader;

constexpr int kNumTopk = 2;
constexpr std::int64_t kNumExperts = 4;
constexpr std::int64_t kNumTokens = 2;

GroupOptions two_nodes() {
  return {.backend = "cpu", .ranks_per_node = 1, .timeout_ns = 20 * kNsPerSecond, .transport = "loopback"};
}

/// Rank 1, built from parts of the library up to the point where it sends false data.
class Liar {
 public:
  explicit Liar(call::CallSync& sync) : sync_(sync), rails_(sync.rails()) {}

  /// Returns a header like rank 0's, after rank 0's header has arrived.
  CallHeader like_rank_0() {
    while (!rails_.has_header(0, 1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CallHeader header;
    std::memcpy(&header, rails_.headers(1), sizeof(header));
    return header;
  }
  void announce(const CallHeader& header) { rails_.announce(header); }
  /// Sends a chunk of the exchange after the one that rank 0 expects. Reads nothing, as this rank would find an
  /// unexpected chunk as well and might be the first to report it.
  Status route_an_exchange_ahead() {
    if (Status status = begin_route(); !status.ok()) return status;
    rail::Ring& ring = rails_.ring(0);
    ring.begin({});
    ring.begin({.num_out = 1, .out_item_bytes = static_cast<std::size_t>(kRowGranuleBytes)});
    ring.commit(ring.reserve());
    return {};
  }
  void wait_for_error() {
    while (!rails_.reported_error()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  /// Routes two tokens to rank 0, with `table` as their forward table.
  Status route(std::int32_t num_rows, const ForwardTable& table) {
    if (Status status = begin_route(); !status.ok()) return status;
    std::vector<std::byte> counts(PeerCounts::at(nullptr, sync_.topology(), kNumExperts).wire_bytes);
    const PeerCounts mine = PeerCounts::at(counts.data(), sync_.topology(), kNumExperts);
    mine.rank_counts[0] = num_rows;
    mine.expert_counts[0] = num_rows;
    mine.tables[0] = table.size();
    if (Status status = exchange(counts, counts.size()); !status.ok()) return status;
    std::vector<std::byte> encoded(table.size().wire_bytes());
    plan::encode(table, encoded.data());
    // Rank 0 has no tokens for this node.
    return exchange(encoded, plan::ForwardTableSize().wire_bytes());
  }

 private:
  Status begin_route() {
    node::CallDescriptor descriptor;
    descriptor.record = like_rank_0().record;
    descriptor.num_entries = kNumTokens * kNumTopk;
    return sync_.begin(descriptor);
  }
  Status exchange(std::span<const std::byte> out, std::size_t in_bytes) {
    std::vector<std::byte> in(in_bytes);
    return call::exchange_bytes(sync_, {out, {}}, {in, {}}, "to receive");
  }

  call::CallSync& sync_;
  rail::Rails& rails_;
};

void be_a_liar(RankContext& context, const std::function<void(Liar&)>& lie) {
  const std::shared_ptr<Bootstrap> bootstrap = context.bootstrap();
  const auto create_mine = [](Bootstrap& shared) -> Result<std::unique_ptr<call::CallSync>> {
    const Result<AgreedOptions> agreed = agree_on_options(shared, two_nodes());
    if (!agreed.ok()) return agreed.status();
    return call::CallSync::create({&shared, agreed->topology, two_nodes()});
  };
  Result<std::unique_ptr<call::CallSync>> sync =
      create_together(*bootstrap, "a liar", two_nodes().timeout_ns, create_mine);
  if (!context.expect_ok(sync.status(), "CallSync::create")) return;
  Liar liar(**sync);
  lie(liar);
  liar.wait_for_error();
}

/// Rank 0 routes two tokens to itself while rank 1 sends false data; it must report `expected` and blame rank 1.
void expect_refusal(std::string_view expected, const std::function<void(Liar&)>& lie) {
  run_ranks({RankKind::kThreads, 2}, [&](RankContext& context) {
    if (context.rank() == 1) return be_a_liar(context, lie);
    const auto group = Group::create(context.bootstrap(), two_nodes());
    if (!context.expect_ok(group.status(), "Group::create")) return;
    const std::vector<std::int64_t> ids(kNumTokens * kNumTopk, 0);
    const RouteInput in{ConstTensorView(ids.data(), DType::kInt64, {kNumTokens, kNumTopk}), {}};
    const Status status = (*group)->route(in, {.num_experts = kNumExperts}).status();
    context.expect_code(status, ErrorCode::kTransport, "route");
    context.expect(status.peer() == 1, fmt::format("rank {} is blamed", status.peer()));
    context.expect(status.message().find(expected) != std::string_view::npos,
                   fmt::format("\"{}\" says \"{}\"", status.message(), expected));
  });
}

/// Table in which rows 2 and 3 of rank 0 belong to rank 1; rows 0 and 1 belong to rank 0's own tokens.
ForwardTable table_of_rows(const std::vector<std::int32_t>& rows) {
  ForwardTable table;
  for (const std::int32_t row : rows) {
    table.tokens.push_back(static_cast<std::int32_t>(table.tokens.size()));
    table.destinations.push_back({row, 0, 0, 1});
    table.first_destination.push_back(static_cast<std::int32_t>(table.destinations.size()));
  }
  return table;
}

TEST(DishonestRank, AHeaderOfAnOperationThatDoesNotExist) {
  expect_refusal("rank 1 announced operation 77", [](Liar& liar) {
    CallHeader header = liar.like_rank_0();
    header.record.operation = static_cast<Operation>(77);
    liar.announce(header);
  });
}

TEST(DishonestRank, AHeaderOfMoreRowsThanTablesCanCount) {
  expect_refusal("max_recv_rows 9223372036854775807", [](Liar& liar) {
    CallHeader header = liar.like_rank_0();
    header.max_recv_rows = std::numeric_limits<std::int64_t>::max();
    liar.announce(header);
  });
}

TEST(DishonestRank, AChunkOfAnotherExchange) {
  expect_refusal("rank 1 sent an unexpected chunk: chunk 0 of exchange 2",
                 [](Liar& liar) { (void)liar.route_an_exchange_ahead(); });
}

TEST(DishonestRank, CountsThatItsTokensCannotHave) {
  expect_refusal("rank 1 published impossible counts for its 2 tokens", [](Liar& liar) {
    (void)liar.route(3, table_of_rows({2, 3}));
  });
}

TEST(DishonestRank, ATableThatLeavesARowWithoutAToken) {
  expect_refusal("rank 1 sent a forward table with 1 rows",
                 [](Liar& liar) { (void)liar.route(2, table_of_rows({2})); });
}

TEST(DishonestRank, ATableThatTakesARowOfAnotherRank) {
  expect_refusal("rank 1 sent a forward table that gives token 1 row 0", [](Liar& liar) {
    (void)liar.route(2, table_of_rows({2, 0}));
  });
}

TEST(DishonestRank, ATableWithARowThatDoesNotExist) {
  expect_refusal("rank 1 sent an invalid forward table", [](Liar& liar) {
    (void)liar.route(2, table_of_rows({2, 4}));
  });
}

}  // namespace
}  // namespace ferry::test
