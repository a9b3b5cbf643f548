/// A rank of another node that keeps to the protocol's words and not to its meaning: the rank that listens refuses what
/// cannot be and names who said it, before any of its memory follows from that.

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

#include "core/group_options.hpp"
#include "cpu/nodes/peer_tables.hpp"
#include "hop/collective.hpp"
#include "hop/rails.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

using cpu::nodes::Counts;
using hop::CallNotice;
using hop::HopTable;

constexpr int kNumTopk = 2;
constexpr std::int64_t kNumExperts = 4;
constexpr std::int64_t kNumTokens = 2;
constexpr std::size_t kGranuleBytes = 16;

GroupOptions two_nodes() {
  return {.backend = "cpu", .ranks_per_node = 1, .timeout_ns = 20 * kNsPerSecond, .transport = "loopback"};
}

/// Rank 1, built of the library's parts up to where it begins to lie.
class Liar {
 public:
  Liar(node::Crew& crew, hop::Rails& rails) : crew_(crew), rails_(rails), collective_(crew, rails) {}

  /// A notice like rank 0's, which has to come first.
  CallNotice like_rank_0() {
    while (!rails_.heard(0, 1)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rails_.publish_notices(1);
    CallNotice notice;
    std::memcpy(&notice, crew_.resolve(rails_.notices(1), 1, {1, sizeof(notice)}), sizeof(notice));
    return notice;
  }
  void announce(const CallNotice& notice) { rails_.announce(notice); }
  void leave_out_an_exchange() { rails_.next_exchange(0); }
  void wait_for_verdict() {
    while (!rails_.told()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  /// Route with two tokens for rank 0, of which `table` is what it says in the end.
  Status route(std::int32_t num_rows, const HopTable& table) {
    node::Ticket ticket;
    ticket.record = like_rank_0().record;
    ticket.num_entries = kNumTokens * kNumTopk;
    if (Status status = collective_.begin(ticket); !status.ok()) return status;
    std::vector<std::byte> counts(Counts::at(nullptr, rails_.topology(), kNumExperts).wire_bytes);
    const Counts mine = Counts::at(counts.data(), rails_.topology(), kNumExperts);
    mine.rank_counts[0] = num_rows;
    mine.expert_counts[0] = num_rows;
    mine.tables[0] = table.size();
    if (Status status = exchange(counts, counts.size()); !status.ok()) return status;
    std::vector<std::byte> encoded(table.size().wire_bytes());
    hop::encode(table, encoded.data());
    // Rank 0 has no tokens for this node.
    return exchange(encoded, hop::HopTableSize().wire_bytes());
  }

 private:
  Status exchange(std::span<const std::byte> out, std::size_t in_bytes) {
    hop::Collective::Items items;
    items.waiting_for = "to listen";
    items.write = [&](int /*node*/, std::int64_t first, std::int64_t count, std::byte* to) {
      std::memcpy(to, out.data() + static_cast<std::size_t>(first) * kGranuleBytes,
                  static_cast<std::size_t>(count) * kGranuleBytes);
    };
    items.use = [](hop::RailExchange& exchange) {
      const auto num_items = static_cast<std::int64_t>(exchange.front(0).size() / kGranuleBytes);
      if (num_items > 0) exchange.pop(0, num_items);
      return num_items > 0;
    };
    const hop::Flow flow{static_cast<std::int64_t>(out.size() / kGranuleBytes),
                         static_cast<std::int64_t>(in_bytes / kGranuleBytes), kGranuleBytes, kGranuleBytes};
    return collective_.exchange({flow, hop::Flow()}, items);
  }

  node::Crew& crew_;
  hop::Rails& rails_;
  hop::Collective collective_;
};

void be_a_liar(RankContext& context, const std::function<void(Liar&)>& lie) {
  const std::shared_ptr<Bootstrap> bootstrap = context.bootstrap();
  const Result<AgreedOptions> agreed = agree_on_options(*bootstrap, two_nodes());
  if (!context.expect_ok(agreed.status(), "agree_on_options")) return;
  const BackendContext backend{bootstrap.get(), agreed->topology, two_nodes()};
  Result<node::Rendezvous> met = node::rendezvous(backend);
  if (!context.expect_ok(met.status(), "rendezvous")) return;
  node::Crew crew(backend, std::move(*met));
  Result<std::unique_ptr<hop::Rails>> rails = hop::Rails::create(backend, crew);
  if (!context.expect_ok(rails.status(), "Rails::create")) return;
  Liar liar(crew, **rails);
  lie(liar);
  liar.wait_for_verdict();
}

/// Rank 0 routes two tokens to itself while rank 1 lies; it must say `expected` of rank 1.
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

/// Rows 2 and 3 of rank 0 are rank 1's: 0 and 1 are its own tokens'.
HopTable table_of_rows(const std::vector<std::int32_t>& rows) {
  HopTable table;
  for (const std::int32_t row : rows) {
    table.tokens.push_back(static_cast<std::int32_t>(table.tokens.size()));
    table.places.push_back({row, 0, 0, 1});
    table.first_place.push_back(static_cast<std::int32_t>(table.places.size()));
  }
  return table;
}

TEST(DishonestRank, ANoticeOfAnOperationThatDoesNotExist) {
  expect_refusal("rank 1 announced operation 77", [](Liar& liar) {
    CallNotice notice = liar.like_rank_0();
    notice.record.operation = static_cast<Operation>(77);
    liar.announce(notice);
  });
}

TEST(DishonestRank, ANoticeOfMoreRowsThanTablesCanCount) {
  expect_refusal("max_recv_rows 9223372036854775807", [](Liar& liar) {
    CallNotice notice = liar.like_rank_0();
    notice.max_recv_rows = std::numeric_limits<std::int64_t>::max();
    liar.announce(notice);
  });
}

TEST(DishonestRank, AChunkOfAnotherExchange) {
  expect_refusal("rank 1 sent a chunk that was not agreed on: number 0 of exchange 2", [](Liar& liar) {
    liar.leave_out_an_exchange();
    (void)liar.route(2, table_of_rows({2, 3}));
  });
}

TEST(DishonestRank, CountsThatItsTokensCannotHave) {
  expect_refusal("rank 1 published counts that its 2 tokens", [](Liar& liar) {
    (void)liar.route(3, table_of_rows({2, 3}));
  });
}

TEST(DishonestRank, ATableThatLeavesARowWithoutAToken) {
  expect_refusal("rank 1 sent a table with 1 rows", [](Liar& liar) { (void)liar.route(2, table_of_rows({2})); });
}

TEST(DishonestRank, ATableThatTakesARowOfAnotherRank) {
  expect_refusal("rank 1 sent a table that gives token 1 row 0", [](Liar& liar) {
    (void)liar.route(2, table_of_rows({2, 0}));
  });
}

TEST(DishonestRank, ATableWithARowThatDoesNotExist) {
  expect_refusal("rank 1 sent tables that cannot be", [](Liar& liar) { (void)liar.route(2, table_of_rows({2, 4})); });
}

}  // namespace
}  // namespace ferry::test
