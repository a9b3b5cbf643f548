/// The kernel of tables by channel, on a routing small enough to be read.

#include "cuda/call/channel_tables.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "emulator/emulator.hpp"

namespace ferry::emulator {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr std::int32_t kUntouched = -7;

/// Rank 0 of 2, whose tokens 0 and 2 go to itself and 1 to the other, which sends it one token.
struct SmallRouting {
  cuda::RouteSummary summary{};
  std::array<cuda::Destination, 3> destinations{};
  std::array<std::int32_t, 2> rank_base{0, 0};
  std::array<std::int32_t, 4> rank_counts{2, 1, 1, 0};
  std::array<std::int32_t, 3> source_base{0, 2, 3};
  std::array<std::int32_t, 6> source{0, 0, 0, 2, 1, 0};
  std::array<std::int64_t, 2> tokens_of_rank{3, 1};
  cuda::LocalState local{};

  std::vector<std::int32_t> rank_prefix = std::vector<std::int32_t>(4, kUntouched);
  std::vector<std::int32_t> sent = rank_prefix;
  std::vector<std::int32_t> received = rank_prefix;
  std::vector<std::int32_t> source_token = std::vector<std::int32_t>(4, kUntouched);
  std::vector<std::int32_t> send_index = std::vector<std::int32_t>(6, kUntouched);

  SmallRouting() {
    summary.valid = 1;
    summary.num_used_rows = 3;
    const std::array<std::int16_t, 3> ranks{0, 1, 0};
    const std::array<std::int32_t, 3> token_rows{0, 0, 1};
    for (std::size_t token = 0; token < destinations.size(); ++token) {
      destinations[token].rank = ranks[token];
      destinations[token].token_row = token_rows[token];
    }
  }

  /// Not early: without source offsets, which routes over several nodes do not have.
  void make_tables(std::int64_t* source_offsets = nullptr) {
    cuda::ChannelTablesParams params;
    params.out.num_channels = 2;
    params.out.num_rows = static_cast<std::int64_t>(source_token.size());
    params.out.rank_prefix = rank_prefix.data();
    params.out.send_channel_prefix = sent.data();
    params.out.recv_channel_prefix = received.data();
    params.out.source_token = source_token.data();
    params.out.send_index = send_index.data();
    params.tables.summary = &summary;
    params.tables.destinations = destinations.data();
    params.tables.rank_base = rank_base.data();
    params.tables.rank_counts = rank_counts.data();
    params.tables.source_base = source_base.data();
    params.tables.tokens_of_rank = tokens_of_rank.data();
    params.tables.source_offsets = source_offsets;
    params.source = source.data();
    params.local = &local;
    params.num_ranks = 2;
    params.num_tokens = 3;
    params.early = source_offsets != nullptr;
    Machine machine(1);
    ASSERT_EQ(cuda::launch_channel_tables(params, machine.add_stream()), cudaSuccess);
    ASSERT_EQ(machine.run(), "");
  }

  void expect_tables() const {
    EXPECT_THAT(rank_prefix, ElementsAre(2, 1, 3, 1));
    EXPECT_THAT(sent, ElementsAre(1, 2, 1, 1));
    EXPECT_THAT(received, ElementsAre(0, 1, 0, 1));
    EXPECT_THAT(source_token, ElementsAre(0, 2, 0, -1));
    EXPECT_THAT(send_index, ElementsAre(0, -1, -1, 0, 1, -1));
  }
};

TEST(EmulatedChannelTables, AreThoseOfTheRouting) {
  SmallRouting routing;
  routing.make_tables();
  routing.expect_tables();
}

TEST(EmulatedChannelTables, AreMadeEarlyUnlessTheRouteIsToBeLaunchedAgain) {
  SmallRouting routing;
  std::array<std::int64_t, 2> source_offsets{cuda::kAnnouncedLater, 128};
  routing.make_tables(source_offsets.data());
  EXPECT_THAT(routing.rank_prefix, Each(kUntouched));
  EXPECT_THAT(routing.source_token, Each(kUntouched));
  source_offsets[0] = 64;
  routing.make_tables(source_offsets.data());
  routing.expect_tables();
}

}  // namespace
}  // namespace ferry::emulator
