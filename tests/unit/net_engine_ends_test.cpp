/// Guarantees of every network engine when ends sleep, close, or are lost.

#include "unit/net_engine.hpp"

namespace ferry::test {
namespace {

TEST_P(NetEngine, DestroyedEndIsLostToTheOthersWhoGoOn) {
  NetEnds ends(GetParam(), {.num_ends = 3});
  ends.connect();
  ends[0].engine->notify(1, 0, 1);
  ends[0].engine->notify(2, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1 && ends[2].highest(0, 0) == 1; }));
  ends[0].engine = nullptr;
  ASSERT_TRUE(ends.poll_until([&] { return !ends[1].lost.empty() && !ends[2].lost.empty(); }));
  for (int survivor : {1, 2}) {
    ASSERT_TRUE(ends[survivor].lost.contains(0));
    EXPECT_EQ(ends[survivor].lost[0].code(), ErrorCode::kPeerLost) << ends[survivor].lost[0].to_string();
    EXPECT_EQ(ends[survivor].lost[0].peer(), 0);
    // Dropped, and the loss is not reported again.
    ends[survivor].engine->put(0, 0, 0, 0, 100);
    ends[survivor].engine->notify(0, 0, 1);
    EXPECT_TRUE(ends[survivor].engine->flushed(0));
  }
  write_pattern(&ends[1], 0, 1000, 5);
  ends[1].engine->put(2, 0, 0, 2000, 1000);
  ends[1].engine->notify(2, 0, 9);
  ASSERT_TRUE(ends.poll_until([&] { return ends[2].highest(1, 0) == 9; }));
  EXPECT_TRUE(has_pattern(ends[2], 2000, 1000, 5));
  EXPECT_EQ(ends[1].num_lost_events, 1);
  EXPECT_EQ(ends[2].num_lost_events, 1);
}

TEST_P(NetEngine, ClosedEndIsLostToTheOthersAfterAllItSent) {
  NetEnds ends(GetParam(), {.num_ends = 3, .memory_bytes = 2 << 20});
  ends.connect();
  write_pattern(&ends[0], 0, 1 << 20, 6);
  ends[0].engine->put(1, 0, 0, 1 << 20, 1 << 20);
  ends[0].engine->notify(1, 0, 1);
  ends.close({0});
  ASSERT_TRUE(ends.poll_until([&] { return !ends[1].lost.empty() && !ends[2].lost.empty(); }));
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
  EXPECT_TRUE(has_pattern(ends[1], 1 << 20, 1 << 20, 6));
  EXPECT_EQ(ends[1].lost[0].code(), ErrorCode::kPeerLost);
}

TEST_P(NetEngine, ClosedEndsMemoryIsLeftAlone) {
  // The others continue to put until they are notified.
  NetEnds ends(GetParam(), {.num_ends = 3, .memory_bytes = 1 << 20});
  ends.connect();
  for (int from : {1, 2}) {
    write_pattern(&ends[from], 0, 1 << 20, 7);
    for (int i = 0; i < 20; ++i) ends[from].engine->put(0, 0, 0, 0, 1 << 20);
  }
  ends.poll();
  ends.close({0});
  std::ranges::fill(ends[0].memory, std::byte{0x55});
  for (int from : {1, 2}) ends[from].engine->put(0, 0, 0, 0, 1 << 20);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0) && ends[2].lost.contains(0); }));
  for (int i = 0; i < 100; ++i) ends.poll();
  EXPECT_TRUE(std::ranges::all_of(ends[0].memory, [](std::byte byte) { return byte == std::byte{0x55}; }));
}

TEST_P(NetEngine, AllCloseWithOperationsInFlight) {
  NetEnds ends(GetParam(), {.num_ends = 3, .num_channels = 2, .memory_bytes = 1 << 20});
  ends.connect();
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (to == from) continue;
      for (int i = 0; i < 5; ++i) {
        ends[from].engine->put(to, i % 2, 0, 1 << 19, 1 << 19);
        ends[from].engine->notify(to, i % 2, 1);
      }
    }
  }
  ends.close({0, 1, 2});
}

TEST_P(NetEngine, CloseTwiceAndUseAfterwards) {
  NetEnds ends(GetParam(), {.timeout_ns = 1'000'000});
  ends.connect();
  ends[0].engine->notify(1, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1 && ends[0].engine->flushed(1); }));
  ends[0].engine->close();
  ends[0].engine->close();
  ends[0].engine->put(1, 0, 0, 0, 10);
  ends[0].engine->notify(1, 0, 1);
  EXPECT_FALSE(ends[0].engine->poll());
  EXPECT_TRUE(ends[0].engine->flushed(1));
  EXPECT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
}

TEST_P(NetEngine, CloseWithoutResponsivePeersEndsByItsDeadline) {
  NetEnds ends(GetParam(), {.timeout_ns = 200'000'000});
  ends.connect();
  ends[0].engine->put(1, 0, 0, 0, 1000);
  ends[0].engine->notify(1, 0, 1);
  ends[0].engine->close();  // the other end is not polled
}

TEST_P(NetEngine, NeverConnected) {
  NetEnds ends(GetParam(), {.num_ends = 3});
  EXPECT_FALSE(ends[0].engine->poll());
  ends[1].engine->close();
}

TEST_P(NetEngine, SleepsUntilSomethingComes) {
  NetEnds ends(GetParam(), {});
  ends.connect();
  ends[0].engine->notify(1, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1 && ends[0].engine->flushed(1); }));
  ASSERT_GE(ends[1].engine->event_fd(), 0);
  // Arming succeeds eventually, as no end sends; then the other end's notify wakes it.
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].engine->arm(); }));
}

}  // namespace
}  // namespace ferry::test
