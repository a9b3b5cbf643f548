/// Counts and forward tables of other ranks that route accepts.

#include "plan/peer_counts.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

namespace ferry::plan {
namespace {

constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

/// Counts of one of four ranks on two nodes for five experts, of three tokens with two entries each.
struct OneRank {
  Topology topology{.rank = 0, .num_ranks = 4, .ranks_per_node = 2};
  std::array<std::int32_t, 4> ranks{3, 0, 2, 1};
  std::array<std::int32_t, 5> experts{3, 0, 0, 2, 1};
  std::array<ForwardTableSize, 2> tables{{{3, 3}, {2, 3}}};
  std::int64_t num_entries = 6;

  bool possible() {
    const PeerCounts counts{ranks.data(), experts.data(), tables.data(), 0};
    const Status status = check_counts(counts, {.num_ranks = 4, .num_experts = 5, .num_topk = 2, .expert_to_rank = {}},
                                       topology, num_entries);
    EXPECT_TRUE(status.ok() || status.code() == ErrorCode::kTransport);
    return status.ok();
  }
};

TEST(PeerCounts, ThatTokensCanHaveAreTaken) { EXPECT_TRUE(OneRank().possible()); }

TEST(PeerCounts, OfEntriesThatAreNoTokensAreRefused) {
  for (const std::int64_t entries : {std::int64_t{-2}, std::int64_t{5}, std::int64_t{kMost} + 1}) {
    OneRank rank;
    rank.num_entries = entries;
    EXPECT_FALSE(rank.possible()) << entries;
  }
}

TEST(PeerCounts, ThatAreNegativeOrTooManyAreRefused) {
  for (const std::int32_t count : {-1, 4, kMost, std::numeric_limits<std::int32_t>::min()}) {
    OneRank rank;
    rank.ranks[1] = count;
    EXPECT_FALSE(rank.possible()) << count;
    rank = OneRank();
    rank.experts[1] = count;
    EXPECT_FALSE(rank.possible()) << count;
    rank = OneRank();
    rank.tables[0].num_items = count;
    EXPECT_FALSE(rank.possible()) << count;
  }
  OneRank rank;
  rank.experts = {3, 3, 1, 0, 0};
  EXPECT_FALSE(rank.possible()) << "seven of six entries";
}

TEST(PeerCounts, OfMoreDestinationsThanEntriesAreRefused) {
  OneRank rank;
  rank.tables[0].num_destinations = 4;
  EXPECT_FALSE(rank.possible());
  rank.tables[0].num_destinations = kMost;
  rank.tables[1].num_destinations = kMost;
  EXPECT_FALSE(rank.possible());
  rank = OneRank();
  rank.tables[1].num_destinations = 1;
  EXPECT_FALSE(rank.possible()) << "two items with one destination";
}

/// Tokens 0 and 2 of rank 5: rows 1 and 3 of rank 0 of this node, and row 0 of rank 1.
ForwardTable two_tokens() {
  ForwardTable table;
  table.tokens = {0, 2};
  table.first_destination = {0, 2, 3};
  table.destinations = {{1, 0, 0, 1}, {0, 1, 1, 1}, {3, 0, 0, 1}};
  return table;
}

/// Tables of the node's rank 0 after counting: rows 1 and 3 belong to rank 5, row 2 to rank 6, row 0 is padding.
struct FourRows {
  std::vector<std::int32_t> source_table{-1, -1, 5, -1, 6, -1, 5, -1};
  std::vector<std::int32_t> item_of_row{0, 0, 0, 0};

  Status enter(const ForwardTable& table, std::int64_t num_rows = 2) {
    return enter_table(table, 5, 0, num_rows, {source_table, item_of_row});
  }
};

TEST(ForwardTables, NamesTheTokenOfEachRowOfItsRank) {
  FourRows rows;
  ASSERT_TRUE(rows.enter(two_tokens()).ok());
  EXPECT_EQ(rows.source_table, (std::vector<std::int32_t>{-1, -1, 5, 0, 6, -1, 5, 2}));
  EXPECT_EQ(rows.item_of_row, (std::vector<std::int32_t>{0, 0, 0, 1}));
}

TEST(ForwardTables, ThatLeavesRowsWithoutATokenIsRefused) {
  ForwardTable table = two_tokens();
  table.destinations[2].rank = 1;
  EXPECT_EQ(FourRows().enter(table).code(), ErrorCode::kTransport);
}

TEST(ForwardTables, ThatTakesOtherRanksRowsOrPaddingIsRefused) {
  for (const std::int32_t row : {0, 2}) {
    ForwardTable table = two_tokens();
    table.destinations[0].row = row;
    EXPECT_EQ(FourRows().enter(table).code(), ErrorCode::kTransport) << row;
  }
}

TEST(ForwardTables, ThatTakesARowTwiceIsRefused) {
  ForwardTable table = two_tokens();
  table.destinations[2].row = 1;
  EXPECT_EQ(FourRows().enter(table).code(), ErrorCode::kTransport);
}

TEST(ForwardTables, OfMoreRowsForARankThanCountedIsRefused) {
  const std::array<std::int64_t, 2> counted{2, 1};
  const std::array<std::int64_t, 2> fewer{2, 0};
  EXPECT_TRUE(check_num_rows(two_tokens(), counted).ok());
  EXPECT_EQ(check_num_rows(two_tokens(), fewer).code(), ErrorCode::kTransport);
}

}  // namespace
}  // namespace ferry::plan
