/// Paths that only a network card takes, over the stand-in for one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/net_ends.hpp"
#include "ucx_card/variable.hpp"

namespace ferry::test {
namespace {

using testing::HasSubstr;

constexpr std::size_t kGpuBytes = 256 << 10;

void fill(std::span<std::byte> memory, std::uint64_t seed) {
  std::ranges::copy(net_pattern(memory.size(), seed), memory.begin());
}

/// Compares the memory as it is at the call: to make the pattern takes so long that late bytes would arrive meanwhile.
bool has_pattern(std::span<const std::byte> memory, std::uint64_t seed) {
  const std::vector<std::byte> seen(memory.begin(), memory.end());
  return seen == net_pattern(seen.size(), seed);
}

TEST(UcxCard, PeersOfOtherHostsAreReachedByTheCard) {
  NetEnds ends("ucx", {});
  ends.connect();
  EXPECT_THAT(ends[0].engine->paths().at(0).description, HasSubstr("rc_mlx5/mlx5_0:1.0 (puts, messages)"));
}

TEST(UcxCard, RoundsOfPutsAndNotifiesShowNoEarlyNotify) {
  constexpr std::size_t kBytes = 5000;
  constexpr std::uint64_t kRounds = 200;
  NetEnds ends("ucx", {.memory_bytes = 2 * kBytes});
  ends.connect();
  int num_wrong = 0;
  ends[1].on_notified = [&](int, int, std::uint64_t value) {
    if (!has_pattern(ends[1].memory.subspan(kBytes), value)) ++num_wrong;
  };
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    fill(ends[0].memory.first(kBytes), round);
    ends[0].engine->put(1, 0, 0, kBytes, kBytes);
    ends[0].engine->notify(1, 0, round);
    ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == round; }));
  }
  EXPECT_EQ(num_wrong, 0);
}

class UcxCardGpu : public testing::TestWithParam<bool> {
 protected:
  static bool reads_back() { return GetParam(); }

  // Without read-backs the GPU would never see a byte.
  CardSettings settings_{GetParam() ? "seed=3,latency_ns=200000,piece_bytes=64,gpu_lag=1"
                                    : "seed=3,latency_ns=200000,piece_bytes=64"};
};

TEST_P(UcxCardGpu, PutsArriveBeforeTheirNotify) {
  NetEnds ends("ucx", {.num_ends = 3, .num_channels = 2, .gpu_bytes = kGpuBytes, .read_back_gpu_writes = reads_back()});
  ends.connect();
  constexpr std::uint64_t kRounds = 20;
  constexpr std::size_t kPart = kGpuBytes / 4;
  int num_wrong = 0;
  for (int to = 1; to < 3; ++to) {
    ends[to].on_notified = [&, to](int, int channel, std::uint64_t value) {
      const auto index = static_cast<std::size_t>(channel);
      const auto part = ends[to].gpu.subspan((2 + index) * kPart, kPart);
      if (!has_pattern(part, value * 2 + index)) ++num_wrong;
    };
  }
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    for (std::size_t channel = 0; channel < 2; ++channel) {
      fill(ends[0].gpu.subspan(channel * kPart, kPart), round * 2 + channel);
      const std::size_t offset = net::kGpuOffset + channel * kPart;
      for (int to = 1; to < 3; ++to) {
        ends[0].engine->put(to, static_cast<int>(channel), offset, offset + 2 * kPart, kPart);
        ends[0].engine->notify(to, static_cast<int>(channel), round);
      }
    }
    const auto heard = [&](int to) { return ends[to].highest(0, 0) == round && ends[to].highest(0, 1) == round; };
    ASSERT_TRUE(ends.poll_until([&] { return heard(1) && heard(2); }));
  }
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(UcxCardGpu, HostAndGpuMemoryOnOneChannel) {
  constexpr std::size_t kBytes = 3000;
  NetEnds ends("ucx", {.memory_bytes = 2 * kBytes, .gpu_bytes = 2 * kBytes, .read_back_gpu_writes = reads_back()});
  ends.connect();
  bool complete = false;
  ends[1].on_notified = [&](int, int, std::uint64_t) {
    complete = has_pattern(ends[1].memory.subspan(kBytes), 1) && has_pattern(ends[1].gpu.subspan(kBytes), 2);
  };
  fill(ends[0].memory.first(kBytes), 1);
  fill(ends[0].gpu.first(kBytes), 2);
  ends[0].engine->put(1, 0, net::kGpuOffset, net::kGpuOffset + kBytes, kBytes);
  ends[0].engine->put(1, 0, 0, kBytes, kBytes);
  ends[0].engine->notify(1, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
  EXPECT_TRUE(complete);
}

TEST_P(UcxCardGpu, PutsOutsideOfTheMemoryEndTheConnection) {
  NetEnds ends("ucx", {.gpu_bytes = 4096, .read_back_gpu_writes = reads_back()});
  ends.connect();
  ends[0].engine->put(1, 0, net::kGpuOffset, net::kGpuOffset + 4000, 97);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(1); }));
  EXPECT_EQ(ends[0].lost[1].peer(), 1);
}

INSTANTIATE_TEST_SUITE_P(, UcxCardGpu, testing::Bool(),
                         [](const auto& instance) { return instance.param ? "read_back" : "in_order"; });

TEST(UcxCard, SeveralCardsCannotBeReadBack) {
  const CardSettings settings("cards=2");
  NetEnds ends("ucx", {.gpu_bytes = 4096, .read_back_gpu_writes = true});
  const Status status = ends.connect(0, ends.addresses());
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_EQ(status.peer(), 1);
}

TEST(UcxCard, SeveralCardsServeAGpuThatSeesTheirWritesInOrder) {
  const CardSettings settings("cards=2,latency_ns=100000");
  NetEnds ends("ucx", {.gpu_bytes = 4096});
  ends.connect();
  fill(ends[0].gpu, 9);
  ends[0].engine->put(1, 0, net::kGpuOffset, net::kGpuOffset, 4096);
  ends[0].engine->notify(1, 0, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 1; }));
  EXPECT_TRUE(has_pattern(ends[1].gpu, 9));
}

TEST(UcxCard, GpuMemoryIsRefusedIfNoCardReachesThePeer) {
  const CardSettings settings("cards=0");
  NetEnds ends("ucx", {.gpu_bytes = 4096});
  const Status status = ends.connect(1, ends.addresses());
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_EQ(status.peer(), 0);
  EXPECT_THAT(std::string(status.message()), HasSubstr("GroupOptions::ring_memory"));
}

TEST(UcxCard, AnEndClosesOnlyOnceItsLateWritesHaveArrived) {
  const CardSettings settings("write_latency_ns=1000000000");
  constexpr std::size_t kBytes = 1000;
  NetEnds ends("ucx", {.memory_bytes = kBytes});
  ends.connect();
  fill(ends[0].memory, 4);
  ends[0].engine->put(1, 0, 0, 0, kBytes);
  ends[0].engine->notify(1, 0, 1);
  ends.close({0});
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
  EXPECT_TRUE(has_pattern(ends[1].memory, 4));
  EXPECT_EQ(ends[1].lost[0].code(), ErrorCode::kPeerLost);
}

TEST(UcxCard, MemoryOfAClosedEndIsLeftAloneByLateWrites) {
  const CardSettings settings("write_latency_ns=300000000");
  constexpr std::size_t kBytes = 1000;
  NetEnds ends("ucx", {.memory_bytes = kBytes});
  ends.connect();
  fill(ends[0].memory, 4);
  ends[0].engine->put(1, 0, 0, 0, kBytes);
  ends.close({1});
  const std::vector<std::byte> at_close(ends[1].owned);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(1); }));
  ends.close({0});
  EXPECT_EQ(ends[1].owned, at_close);
}

TEST(UcxCard, GetsReadWhatAFlushHasBroughtThere) {
  constexpr std::size_t kBytes = 5000;
  NetEnds ends("ucx", {.memory_bytes = kBytes});
  ends.connect();
  for (std::uint64_t round = 1; round <= 20; ++round) {
    const std::vector<std::byte> source = net_pattern(kBytes, round);
    std::vector<std::byte> got(kBytes);
    ends[0].engine->put_from(1, 0, source, 0);
    ends[0].engine->flush(1, 2 * round);
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(2 * round); }));
    ends[0].engine->get(1, got, 0, 2 * round + 1);
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(2 * round + 1); }));
    EXPECT_EQ(got, source);
  }
}

}  // namespace
}  // namespace ferry::test
