/// Guarantees of every network engine: puts, notifies, and the memory that they reach.

#include <poll.h>

#include <array>
#include <numeric>
#include <set>

#include "unit/net_engine.hpp"

namespace ferry::test {
namespace {

std::string engine_name(const testing::TestParamInfo<const char*>& info) { return info.param; }

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

INSTANTIATE_TEST_SUITE_P(Engines, NetEngine, testing::Values(FERRY_TEST_ENGINES), engine_name);

}  // namespace
}  // namespace ferry::test
