/// Faults that tests of higher layers inject, and checks of the in-process engine.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "net/loopback/engine.hpp"
#include "support/loopback_faults.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

using net::LoopbackFaults;

void poll_times(NetEnds* ends, int num_polls) {
  for (int i = 0; i < num_polls; ++i) ends->poll();
}

TEST(LoopbackFaults, DelayLastsSoManyPolls) {
  LoopbackFaults faults;
  NetEnds ends("loopback", {.num_ends = 3});
  ends.connect();
  faults.delay(0, 1, 5);
  ends[0].engine->notify(1, 0, 1);
  ends[2].engine->notify(1, 0, 2);
  poll_times(&ends, 5);
  EXPECT_EQ(ends[1].highest(0, 0), 0U);
  EXPECT_EQ(ends[1].highest(2, 0), 2U);
  EXPECT_FALSE(ends[1].engine->arm());  // it must be polled to make progress
  poll_times(&ends, 1);
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
}

TEST(LoopbackFaults, HeldUntilReleasedInOrder) {
  LoopbackFaults faults;
  NetEnds ends("loopback", {.num_channels = 2, .memory_bytes = 64});
  ends.connect();
  faults.hold(0, 1);
  ends[0].memory[0] = std::byte{7};
  ends[0].engine->put(1, 0, 0, 8, 1);
  ends[0].engine->notify(1, 0, 1);
  ends[1].engine->notify(0, 0, 1);
  poll_times(&ends, 50);
  EXPECT_EQ(ends[1].memory[8], std::byte{0});
  EXPECT_TRUE(ends[1].heard.empty());
  EXPECT_EQ(ends[0].highest(1, 0), 1U) << "the other direction is not held";
  EXPECT_TRUE(ends[1].engine->arm());
  faults.release(0, 1);
  poll_times(&ends, 1);
  EXPECT_EQ(ends[1].memory[8], std::byte{7});
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
}

TEST(LoopbackFaults, EndWithTheFaults) {
  NetEnds ends("loopback", {});
  ends.connect();
  {
    LoopbackFaults faults;
    faults.hold(0, 1);
    ends[0].engine->notify(1, 0, 1);
    poll_times(&ends, 5);
    EXPECT_TRUE(ends[1].heard.empty());
  }
  poll_times(&ends, 1);
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
}

TEST(LoopbackFaults, ReorderMixesChannelsButNeverOne) {
  LoopbackFaults faults;
  faults.reorder(5);
  constexpr int kNumChannels = 4;
  constexpr int kRounds = 50;
  NetEnds ends("loopback", {.num_channels = kNumChannels, .memory_bytes = 64});
  ends.connect();
  std::vector<int> channels;
  int num_wrong = 0;
  ends[1].on_notified = [&](int, int channel, std::uint64_t value) {
    channels.push_back(channel);
    if (std::to_integer<std::uint64_t>(ends[1].memory[static_cast<std::size_t>(channel)]) != value) ++num_wrong;
  };
  for (int round = 1; round <= kRounds; ++round) {
    for (int channel = 0; channel < kNumChannels; ++channel) {
      const auto offset = static_cast<std::size_t>(channel);
      ends[0].memory[offset] = static_cast<std::byte>(round);
      ends[0].engine->put(1, channel, offset, offset, 1);
      ends[0].engine->notify(1, channel, static_cast<std::uint64_t>(round));
    }
  }
  poll_times(&ends, 1);
  EXPECT_EQ(channels.size(), static_cast<std::size_t>(kNumChannels) * kRounds);
  EXPECT_EQ(num_wrong, 0);
  std::vector<int> in_order;
  for (std::size_t i = 0; i < channels.size(); ++i) in_order.push_back(static_cast<int>(i) % kNumChannels);
  EXPECT_NE(channels, in_order);
  for (int channel = 0; channel < kNumChannels; ++channel) {
    EXPECT_TRUE(std::ranges::is_sorted(ends[1].heard[{0, channel}]));
  }
}

/// Only the order required by engine.hpp remains.
TEST(LoopbackFaults, ScrambleLeavesPutsBeforeTheirNotify) {
  LoopbackFaults faults;
  faults.scramble(5);
  constexpr int kNumChannels = 2;
  constexpr std::uint64_t kRounds = 60;
  const auto place = [](int channel, std::uint64_t round) {
    return static_cast<std::size_t>(channel) * kRounds + static_cast<std::size_t>(round) - 1;
  };
  NetEnds ends("loopback", {.num_channels = kNumChannels, .memory_bytes = kNumChannels * kRounds});
  ends.connect();
  int num_early_notifies = 0;
  int num_early_puts = 0;
  ends[1].on_notified = [&](int, int channel, std::uint64_t value) {
    for (std::uint64_t round = 1; round <= value; ++round) {
      if (ends[1].memory[place(channel, round)] == std::byte{0}) ++num_early_notifies;
    }
    for (std::uint64_t round = value + 1; round <= kRounds; ++round) {
      if (ends[1].memory[place(channel, round)] != std::byte{0}) ++num_early_puts;
    }
  };
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    for (int channel = 0; channel < kNumChannels; ++channel) {
      ends[0].memory[place(channel, round)] = std::byte{1};
      ends[0].engine->put(1, channel, place(channel, round), place(channel, round), 1);
      ends[0].engine->notify(1, channel, round);
    }
    poll_times(&ends, 1);
  }
  ends[0].engine->close();
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].num_lost_events == 1; }));
  EXPECT_EQ(num_early_notifies, 0);
  EXPECT_GT(num_early_puts, 0) << "puts of a later round arrive before a notify";
  for (int channel = 0; channel < kNumChannels; ++channel) {
    const std::vector<std::uint64_t>& heard = ends[1].heard[{0, channel}];
    EXPECT_EQ(heard.size(), kRounds) << "a peer's end follows all its messages";
    EXPECT_FALSE(std::ranges::is_sorted(heard)) << "notifies of one channel overtake each other";
  }
  EXPECT_GT(faults.counts().num_delayed, 0U);
  EXPECT_GT(faults.counts().num_overtaken, faults.counts().num_stale_notifies);
  EXPECT_GT(faults.counts().num_stale_notifies, 0U);
}

TEST(LoopbackFaults, CountsAreThoseOfWhatHappened) {
  {
    LoopbackFaults faults;
    NetEnds ends("loopback", {.num_channels = 2});
    ends.connect();
    for (std::uint64_t value = 1; value <= 10; ++value) ends[0].engine->notify(1, static_cast<int>(value % 2), value);
    poll_times(&ends, 1);
    EXPECT_EQ(faults.counts().num_delayed, 0U);
    EXPECT_EQ(faults.counts().num_overtaken, 0U);
    faults.delay(0, 1, 3);
    for (std::uint64_t value = 11; value <= 20; ++value) ends[0].engine->notify(1, static_cast<int>(value % 2), value);
    poll_times(&ends, 5);
    EXPECT_EQ(faults.counts().num_delayed, 10U);
    faults.reorder(3);
    for (std::uint64_t value = 21; value <= 30; ++value) ends[0].engine->notify(1, static_cast<int>(value % 2), value);
    poll_times(&ends, 5);
    EXPECT_GT(faults.counts().num_overtaken, 0U);
    EXPECT_EQ(faults.counts().num_stale_notifies, 0U) << "a channel keeps its order";
  }
  const LoopbackFaults fresh_faults;
  EXPECT_EQ(fresh_faults.counts().num_delayed, 0U);
  EXPECT_EQ(fresh_faults.counts().num_overtaken, 0U);
}

TEST(LoopbackFaults, DropIsSilent) {
  LoopbackFaults faults;
  NetEnds ends("loopback", {});
  ends.connect();
  faults.drop(0, 1);
  ends[0].engine->notify(1, 0, 1);
  ends[1].engine->notify(0, 0, 1);
  poll_times(&ends, 20);
  EXPECT_TRUE(ends[1].heard.empty());
  EXPECT_EQ(ends[0].highest(1, 0), 1U);
  EXPECT_TRUE(ends[0].lost.empty());
  EXPECT_TRUE(ends[1].lost.empty());
}

TEST(LoopbackFaults, CutIsReportedToBothAndOnlyThem) {
  LoopbackFaults faults;
  NetEnds ends("loopback", {.num_ends = 3});
  ends.connect();
  ends[0].engine->notify(1, 0, 1);
  faults.cut(0, 1);
  poll_times(&ends, 3);
  EXPECT_TRUE(ends[1].heard.empty()) << "messages in transit are lost too";
  EXPECT_EQ(ends[0].lost[1].code(), ErrorCode::kTransport);
  EXPECT_EQ(ends[1].lost[0].code(), ErrorCode::kTransport);
  EXPECT_EQ(ends[0].num_lost_events, 1);
  EXPECT_TRUE(ends[2].lost.empty());
  ends[0].engine->notify(2, 0, 5);
  poll_times(&ends, 1);
  EXPECT_EQ(ends[2].highest(0, 0), 5U);
}

/// Sets FERRY_LOOPBACK_RATE while it lives.
class Rate {
 public:
  explicit Rate(const char* bytes_per_s) { setenv("FERRY_LOOPBACK_RATE", bytes_per_s, 1); }
  ~Rate() { unsetenv("FERRY_LOOPBACK_RATE"); }
  Rate(const Rate&) = delete;
  Rate& operator=(const Rate&) = delete;
};

TEST(LoopbackRate, PutsTakeTheirTimeAndWhatFollowsThemWaits) {
  const Rate rate("1");  // 64 s
  NetEnds ends("loopback", {.memory_bytes = 64});
  ends.connect();
  ends[0].engine->notify(1, 0, 1);
  ends[0].engine->put(1, 0, 0, 0, 64);
  ends[0].engine->notify(1, 0, 2);
  poll_times(&ends, 50);
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
  EXPECT_FALSE(ends[1].engine->arm()) << "nothing wakes the end when the time is over";
}

TEST(LoopbackRate, FastLinksDeliverEverything) {
  const Rate rate("1000000000000");
  NetEnds ends("loopback", {.memory_bytes = 64});
  ends.connect();
  ends[0].memory[0] = std::byte{7};
  ends[0].engine->put(1, 0, 0, 8, 1);
  ends[0].engine->notify(1, 0, 1);
  while (ends[1].highest(0, 0) == 0) ends.poll();
  EXPECT_EQ(ends[1].memory[8], std::byte{7});
}

TEST(LoopbackRate, MustBeANumberOfBytes) {
  for (const char* wrong : {"0", "-1", "10G", "fast"}) {
    const Rate rate(wrong);
    const Status status = net::loopback::create_engine({}).status();
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << wrong;
    EXPECT_NE(status.message().find(wrong), std::string_view::npos) << status.message();
  }
}

TEST(Loopback, PutOutsideOfTheReceiversMemoryIsNotWritten) {
  NetEnds ends("loopback", {.memory_bytes = 100});
  ends.connect();
  for (const std::size_t offset : {std::size_t{91}, std::size_t{100}, SIZE_MAX, SIZE_MAX - 5}) {
    NetEnds fresh("loopback", {.memory_bytes = 100});
    fresh.connect();
    fresh[0].engine->put(1, 0, 0, offset, 10);
    poll_times(&fresh, 1);
    EXPECT_EQ(fresh[1].lost[0].code(), ErrorCode::kTransport) << "offset " << offset;
  }
}

TEST(Loopback, PeerThatLeftBeforeConnectIsLost) {
  NetEnds ends("loopback", {});
  const std::vector<net::Blob> addresses = ends.addresses();
  ends[1].engine = nullptr;
  ASSERT_TRUE(ends.connect(0, addresses).ok());
  EXPECT_TRUE(ends[0].engine->poll());
  EXPECT_EQ(ends[0].lost[1].code(), ErrorCode::kPeerLost);
  EXPECT_EQ(ends[0].num_lost_events, 1);
}

}  // namespace
}  // namespace ferry::test
