/// Guarantees of every network engine, through the proxy's interface.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>

#include "net/blob.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

using testing::HasSubstr;

class NetEngine : public testing::TestWithParam<const char*> {
 protected:
  // An engine that is built in must run: a skipped test proves nothing.
  void SetUp() override {
    const Status status = net_engine(GetParam()).probe();
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
};

std::string engine_name(const testing::TestParamInfo<const char*>& info) { return info.param; }

void write_pattern(NetEnd* end, std::size_t offset, std::size_t count, std::uint64_t seed) {
  std::ranges::copy(net_pattern(count, seed), end->memory.begin() + static_cast<std::ptrdiff_t>(offset));
}

/// Compares the memory as it is at the call: to make the pattern takes so long that late bytes would arrive meanwhile.
bool has_pattern(const NetEnd& end, std::size_t offset, std::size_t count, std::uint64_t seed) {
  const std::span<std::byte> memory = end.memory.subspan(offset, count);
  const std::vector<std::byte> seen(memory.begin(), memory.end());
  return seen == net_pattern(count, seed);
}

/// Engine's own part of the blob of `end`.
net::Blob own_part_of(const NetEnd& end, const net::Blob& blob) {
  const auto own_part = net::parse_blob(blob, end.engine->name(), end.options, end.options.self).value();
  return {own_part.begin(), own_part.end()};
}

TEST_P(NetEngine, NameIsTheFactorys) {
  NetEnds ends(GetParam(), {});
  EXPECT_EQ(ends[0].engine->name(), net_engine(GetParam()).name);
  ends.connect();
}

TEST_P(NetEngine, NotifyComesAfterThePutsOfItsChannel) {
  // Each size at its own offset and on its own channel, all in flight at once; each notify checks its bytes on arrival.
  constexpr std::array<std::size_t, 10> kSizes{1,        7,         64,         1000,    4096,
                                               8 * 1024, 64 * 1024, 256 * 1024, 1 << 20, (3 << 20) + 5};
  constexpr int kNumChannels = static_cast<int>(kSizes.size());
  std::array<std::size_t, kSizes.size()> offsets{};
  std::exclusive_scan(kSizes.begin(), kSizes.end(), offsets.begin(), std::size_t{0});
  const std::size_t half = offsets.back() + kSizes.back();
  NetEnds ends(GetParam(), {.num_channels = kNumChannels, .memory_bytes = 2 * half});
  ends.connect();
  constexpr std::uint64_t kRounds = 5;
  std::set<int> arrived;
  int num_wrong = 0;
  ends[1].on_notified = [&](int /*peer*/, int channel, std::uint64_t value) {
    const auto index = static_cast<std::size_t>(channel);
    if (!has_pattern(ends[1], half + offsets[index], kSizes[index], value * 100 + index)) ++num_wrong;
    arrived.insert(channel);
  };
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    arrived.clear();
    for (int channel = 0; channel < kNumChannels; ++channel) {
      const auto index = static_cast<std::size_t>(channel);
      write_pattern(&ends[0], offsets[index], kSizes[index], round * 100 + index);
      ends[0].engine->put(1, channel, offsets[index], half + offsets[index], kSizes[index]);
      ends[0].engine->notify(1, channel, round);
    }
    ASSERT_TRUE(ends.poll_until([&] { return arrived.size() == kSizes.size(); })) << "round " << round;
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(NetEngine, APutWithItsNotifyComesAfterThePutsBeforeIt) {
  constexpr std::array<std::size_t, 6> kSizes{1, 64, 4000, 40'000, 128 << 10, 300'000};
  constexpr std::size_t kLast = 100;
  constexpr std::size_t kHalf = 1 << 19;
  NetEnds ends(GetParam(), {.num_channels = 2, .memory_bytes = 2 * kHalf});
  ends.connect();
  int num_wrong = 0;
  ends[1].on_notified = [&](int, int channel, std::uint64_t value) {
    if (channel == 0 && !has_pattern(ends[1], kHalf, kSizes[value - 1] + kLast, value)) ++num_wrong;
  };
  for (std::uint64_t value = 1; value <= kSizes.size(); ++value) {
    const std::size_t num_bytes = kSizes[value - 1];
    write_pattern(&ends[0], 0, num_bytes + kLast, value);
    ends[0].engine->put(1, 1, kHalf - 1, kHalf - 1, 1);
    ends[0].engine->notify(1, 1, value);
    ends[0].engine->put(1, 0, 0, kHalf, num_bytes);
    ends[0].engine->put_notify(1, 0, num_bytes, kHalf + num_bytes, kLast, value);
    ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == value && ends[1].highest(0, 1) == value; }))
        << num_bytes;
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(NetEngine, APutOfAnySizeComesWithItsNotify) {
  constexpr std::array<std::size_t, 8> kSizes{0, 1, 64, 4096, 4097, 40'000, 128 << 10, 300'000};
  constexpr std::size_t kHalf = 1 << 19;
  NetEnds ends(GetParam(), {.memory_bytes = 2 * kHalf});
  ends.connect();
  int num_wrong = 0;
  ends[1].on_notified = [&](int, int, std::uint64_t value) {
    if (!has_pattern(ends[1], kHalf, kSizes[value - 1], value)) ++num_wrong;
  };
  for (std::uint64_t value = 1; value <= kSizes.size(); ++value) {
    write_pattern(&ends[0], 0, kSizes[value - 1], value);
    ends[0].engine->put_notify(1, 0, 0, kHalf, kSizes[value - 1], value);
    ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == value; })) << kSizes[value - 1];
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(NetEngine, ManyPutsThenOneNotify) {
  constexpr std::size_t kNumPuts = 2000;
  constexpr std::size_t kBytes = 96;
  NetEnds ends(GetParam(), {.memory_bytes = kNumPuts * kBytes});
  ends.connect();
  write_pattern(&ends[0], 0, kNumPuts * kBytes, 3);
  for (std::size_t i = 0; i < kNumPuts; ++i) ends[0].engine->put(1, 0, i * kBytes, i * kBytes, kBytes);
  ends[0].engine->notify(1, 0, 1);
  bool complete = false;
  ends[1].on_notified = [&](int, int, std::uint64_t) { complete = has_pattern(ends[1], 0, kNumPuts * kBytes, 3); };
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
  EXPECT_TRUE(complete);
}

TEST_P(NetEngine, AllocatesMemoryWhereItsOwnerHasNone) {
  constexpr std::size_t kBytes = 300'000;
  NetEnds ends(GetParam(), {.num_ends = 3, .memory_bytes = 3 * kBytes, .engine_allocates = true});
  for (int end = 0; end < ends.size(); ++end) {
    ASSERT_EQ(ends[end].memory.size(), 3 * kBytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ends[end].memory.data()) % 64, 0U);
    write_pattern(&ends[end], static_cast<std::size_t>(end) * kBytes, kBytes, static_cast<std::uint64_t>(end));
  }
  ends.connect();
  for (int from = 0; from < ends.size(); ++from) {
    for (int to = 0; to < ends.size(); ++to) {
      if (to == from) continue;
      const std::size_t offset = static_cast<std::size_t>(from) * kBytes;
      ends[from].engine->put(to, 0, offset, offset, kBytes);
      ends[from].engine->notify(to, 0, 1);
    }
  }
  ASSERT_TRUE(ends.poll_until([&] {
    for (int end = 0; end < ends.size(); ++end) {
      for (int peer = 0; peer < ends.size(); ++peer) {
        if (peer != end && ends[end].highest(peer, 0) != 1) return false;
      }
    }
    return true;
  }));
  for (int end = 0; end < ends.size(); ++end) {
    for (int peer = 0; peer < ends.size(); ++peer) {
      EXPECT_TRUE(
          has_pattern(ends[end], static_cast<std::size_t>(peer) * kBytes, kBytes, static_cast<std::uint64_t>(peer)))
          << "bytes that end " << peer << " put at end " << end;
    }
  }
}

TEST_P(NetEngine, AllPairsAtOnce) {
  constexpr int kNumEnds = 4;
  constexpr std::size_t kBytes = 20'000;
  constexpr std::uint64_t kRounds = 20;
  NetEnds ends(GetParam(), {.num_ends = kNumEnds, .num_channels = 2, .memory_bytes = 2 * kNumEnds * kBytes});
  ends.connect();
  const auto out = [](int peer) { return static_cast<std::size_t>(peer) * kBytes; };
  const auto in = [](int peer) { return static_cast<std::size_t>(kNumEnds + peer) * kBytes; };
  const auto seed_of = [](std::uint64_t round, int from, int to) {
    return round * 100 + static_cast<std::uint64_t>(from * 10 + to);
  };
  int num_wrong = 0;
  for (int self = 0; self < kNumEnds; ++self) {
    ends[self].on_notified = [&, self](int peer, int, std::uint64_t value) {
      if (!has_pattern(ends[self], in(peer), kBytes, seed_of(value, peer, self))) ++num_wrong;
    };
  }
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    for (int from = 0; from < kNumEnds; ++from) {
      for (int to = 0; to < kNumEnds; ++to) {
        if (from == to) continue;
        write_pattern(&ends[from], out(to), kBytes, seed_of(round, from, to));
        ends[from].engine->put(to, 1, out(to), in(from), kBytes);
        ends[from].engine->notify(to, 1, round);
      }
    }
    ASSERT_TRUE(ends.poll_until([&] {
      for (int to = 0; to < kNumEnds; ++to) {
        for (int from = 0; from < kNumEnds; ++from) {
          if (from != to && ends[to].highest(from, 1) < round) return false;
        }
      }
      return true;
    })) << "round "
        << round;
  }
  EXPECT_EQ(num_wrong, 0);
  for (int self = 0; self < kNumEnds; ++self) EXPECT_TRUE(ends[self].lost.empty());
}

TEST_P(NetEngine, PeersOfThisHostAndOfOthersAtOnce) {
  constexpr std::size_t kBytes = 300'000;
  NetEnds ends(GetParam(),
               {.num_ends = 4, .memory_bytes = 5 * kBytes, .engine_allocates = true, .hosts = {0, 0, 1, 1}});
  ends.connect();
  for (int from = 0; from < ends.size(); ++from) {
    write_pattern(&ends[from], 4 * kBytes, kBytes, static_cast<std::uint64_t>(from));
    for (int to = 0; to < ends.size(); ++to) {
      if (to == from) continue;
      ends[from].engine->put(to, 0, 4 * kBytes, static_cast<std::size_t>(from) * kBytes, kBytes);
      ends[from].engine->notify(to, 0, 1);
    }
  }
  for (int to = 0; to < ends.size(); ++to) {
    ASSERT_GE(ends[to].engine->event_fd(), 0);
    for (int from = 0; from < ends.size(); ++from) {
      if (to == from) continue;
      ASSERT_TRUE(ends.poll_until([&] { return ends[to].highest(from, 0) == 1; })) << from << " to " << to;
      EXPECT_TRUE(
          has_pattern(ends[to], static_cast<std::size_t>(from) * kBytes, kBytes, static_cast<std::uint64_t>(from)));
    }
  }
  // Both kinds of peers wake an end that sleeps.
  for (const int from : {1, 2}) {
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].engine->arm(); }));
    ends[from].engine->notify(0, 0, 2);
    pollfd wakes{ends[0].engine->event_fd(), POLLIN, 0};
    for (int round = 0; round < 3000 && wakes.revents == 0; ++round) {
      ends[from].engine->poll();
      ASSERT_GE(poll(&wakes, 1, 10), 0);
    }
    EXPECT_NE(wakes.revents & POLLIN, 0) << "from " << from;
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].highest(from, 0) == 2; }));
  }
  ends.close({1});
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(1) && ends[2].lost.contains(1); }));
}

TEST_P(NetEngine, ThousandsOfNotifiesAllArrive) {
  constexpr std::uint64_t kNumValues = 5000;
  NetEnds ends(GetParam(), {.num_channels = 3});
  ends.connect();
  for (std::uint64_t value = 1; value <= kNumValues; ++value) {
    ends[0].engine->notify(1, static_cast<int>(value % 3), value);
    ends[1].engine->notify(0, 0, value);
  }
  ASSERT_TRUE(ends.poll_until([&] {
    return ends[1].heard[{0, 0}].size() + ends[1].heard[{0, 1}].size() + ends[1].heard[{0, 2}].size() == kNumValues &&
           ends[0].heard[{1, 0}].size() == kNumValues;
  }));
  EXPECT_EQ(ends[0].highest(1, 0), kNumValues);
}

TEST_P(NetEngine, LargestValuePasses) {
  NetEnds ends(GetParam(), {});
  ends.connect();
  ends[0].engine->notify(1, 0, UINT64_MAX);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == UINT64_MAX; }));
}

TEST_P(NetEngine, PutsOfNothing) {
  NetEnds ends(GetParam(), {.memory_bytes = 4096});
  ends.connect();
  ends[0].engine->put(1, 0, 0, 0, 0);
  ends[0].engine->put(1, 0, 4096, 4096, 0);
  ends[0].engine->notify(1, 0, 1);
  EXPECT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
  EXPECT_TRUE(ends[0].lost.empty());
}

TEST_P(NetEngine, MemoryOfNothing) {
  NetEnds ends(GetParam(), {.memory_bytes = 0});
  ends.connect();
  ends[0].engine->put(1, 0, 0, 0, 0);
  ends[0].engine->notify(1, 0, 1);
  EXPECT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
}

TEST_P(NetEngine, PutsTouchNothingElse) {
  NetEnds ends(GetParam(), {.memory_bytes = 4096});
  ends.connect();
  write_pattern(&ends[0], 0, 4096, 8);
  ends[0].engine->put(1, 0, 100, 1000, 1);
  ends[0].engine->put(1, 0, 200, 4095, 1);
  ends[0].engine->notify(1, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
  for (std::size_t i = 0; i < 4096; ++i) {
    const std::byte expected = i == 1000 ? ends[0].memory[100] : i == 4095 ? ends[0].memory[200] : std::byte{0};
    ASSERT_EQ(ends[1].memory[i], expected) << "byte " << i;
  }
}

TEST_P(NetEngine, FlushedOnceTheBytesHaveLeft) {
  NetEnds ends(GetParam(), {.memory_bytes = 2 << 20});
  ends.connect();
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].engine->flushed(1); }));
  ends[0].engine->put(1, 0, 0, 1 << 20, 1 << 20);
  ends[0].engine->notify(1, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].engine->flushed(1); }));
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
}

TEST_P(NetEngine, PathsNameEveryPeer) {
  NetEnds ends(GetParam(), {.num_ends = 3});
  ends.connect();
  for (int to : {0, 2}) ends[1].engine->notify(to, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].highest(1, 0) == 1 && ends[2].highest(1, 0) == 1; }));
  const std::vector<net::Path> paths = ends[1].engine->paths();
  ASSERT_EQ(paths.size(), 2U);
  EXPECT_EQ(paths[0].peer, 0);
  EXPECT_EQ(paths[1].peer, 2);
  for (const net::Path& path : paths) {
    EXPECT_FALSE(path.description.empty());
    EXPECT_EQ(path.description.find('\n'), std::string::npos) << path.description;
    EXPECT_EQ(path.description.find("unknown"), std::string::npos) << path.description;
    RecordProperty("path", path.description);
    EXPECT_TRUE(path.in_memory || GetParam() != std::string_view("loopback"));
  }
}

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

// Untrusted input.

TEST_P(NetEngine, TruncatedBlobsAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  EXPECT_LE(good[1].size(), net::kMaxBlobBytes);
  for (std::size_t length = 0; length < good[1].size(); ++length) {
    std::vector<net::Blob> bad = good;
    bad[1].resize(length);
    const Status status = ends.connect(0, bad);
    ASSERT_EQ(status.code(), ErrorCode::kTransport) << "length " << length;
    EXPECT_EQ(status.peer(), 1);
  }
  EXPECT_TRUE(ends.connect(0, good).ok());
}

TEST_P(NetEngine, CorruptedBlobsAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  for (std::size_t place = 0; place < good[1].size(); ++place) {
    std::vector<net::Blob> bad = good;
    bad[1][place] ^= std::byte{0x10};
    ASSERT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport) << "byte " << place;
  }
  std::mt19937_64 random(4);
  for (int i = 0; i < 2000; ++i) {
    std::vector<net::Blob> bad = good;
    bad[1] = net_pattern(random() % 400, random());
    ASSERT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport);
  }
  std::vector<net::Blob> longer = good;
  longer[1].push_back(std::byte{0});
  EXPECT_EQ(ends.connect(0, longer).code(), ErrorCode::kTransport);
  longer[1].resize(net::kMaxBlobBytes + 1);
  EXPECT_EQ(ends.connect(0, longer).code(), ErrorCode::kTransport);
}

TEST_P(NetEngine, OwnPartsOfWrongLengthAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  const net::Blob own_part = own_part_of(ends[1], good[1]);
  for (std::size_t length = 0; length < own_part.size(); ++length) {
    std::vector<net::Blob> bad = good;
    bad[1] = net::make_blob(ends[1].engine->name(), ends[1].options, std::span(own_part).first(length)).value();
    ASSERT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport) << "length " << length;
  }
  net::Blob longer = own_part;
  longer.push_back(std::byte{0});
  std::vector<net::Blob> bad = good;
  bad[1] = net::make_blob(ends[1].engine->name(), ends[1].options, longer).value();
  EXPECT_EQ(ends.connect(0, bad).code(), ErrorCode::kTransport);
}

TEST_P(NetEngine, EndsThatDoNotFitAreRefused) {
  NetEnds ends(GetParam(), {});
  const std::vector<net::Blob> good = ends.addresses();
  const net::Blob own_part = own_part_of(ends[1], good[1]);
  const auto expect_refused = [&](std::string_view engine, const net::EngineOptions& options, std::string_view words) {
    std::vector<net::Blob> bad = good;
    bad[1] = net::make_blob(engine, options, own_part).value();
    const Status status = ends.connect(0, bad);
    EXPECT_EQ(status.code(), ErrorCode::kTransport);
    EXPECT_THAT(status.message(), HasSubstr(std::string(words)));
  };
  expect_refused("carrier pigeon", ends[1].options, "carrier pigeon");
  net::EngineOptions options = ends[1].options;
  options.memory = options.memory.first(100);
  expect_refused(ends[1].engine->name(), options, "100 bytes of memory, expected 65536");
  options = ends[1].options;
  options.self = 0;
  expect_refused(ends[1].engine->name(), options, "end 0 of 2");
  options = ends[1].options;
  options.num_channels = 7;
  expect_refused(ends[1].engine->name(), options, "with 7 channels, expected end 1 of 2 with 1");
  EXPECT_FALSE(ends.connect(0, {}).ok());
}

TEST_P(NetEngine, MessagesWithAWrongTokenAreIgnored) {
  NetEnds ends(GetParam(), {.timeout_ns = 100'000'000});
  const std::vector<net::Blob> good = ends.addresses();
  net::Blob own_part = own_part_of(ends[1], good[1]);
  own_part[0] ^= std::byte{1};
  std::vector<net::Blob> wrong = good;
  wrong[1] = net::make_blob(ends[1].engine->name(), ends[1].options, own_part).value();
  ASSERT_TRUE(ends.connect(0, wrong).ok());
  ASSERT_TRUE(ends.connect(1, good).ok());
  ends[0].engine->notify(1, 0, 1);
  ends[1].engine->notify(0, 0, 1);
  EXPECT_TRUE(ends.poll_until([&] { return ends[0].highest(1, 0) == 1; }));
  for (int i = 0; i < 1000; ++i) ends.poll();
  EXPECT_TRUE(ends[1].heard.empty());
}

INSTANTIATE_TEST_SUITE_P(Engines, NetEngine, testing::Values(FERRY_TEST_ENGINES), engine_name);

}  // namespace
}  // namespace ferry::test
