/// Ways in which the stand-in's ends run: with threads that sleep or spin, or without any. Ranks of one process are
/// threads of their own, so that their ends work at the same time.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "support/net_ends.hpp"
#include "ucx_card/variable.hpp"

namespace ferry::test {
namespace {

constexpr int kNumEnds = 4;
constexpr std::size_t kPart = 3000;
constexpr std::chrono::seconds kPatience{30};

struct Mode {
  const char* name;
  const char* settings;
};

class UcxCardModes : public testing::TestWithParam<Mode> {
 protected:
  CardSettings settings_{GetParam().settings};
};

/// Polls one end in its own thread until `done`. False: it was not done in time.
template <typename Done>
bool poll_alone(NetEnd& end, Done done) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!done()) {
    if (!end.engine->poll()) std::this_thread::yield();
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
  return true;
}

std::uint64_t seed_of(int from, int to, std::uint64_t round) {
  return (round * kNumEnds + static_cast<std::uint64_t>(from)) * kNumEnds + static_cast<std::uint64_t>(to);
}

TEST_P(UcxCardModes, EndsOfManyThreadsGetEveryByteBeforeItsNotify) {
  constexpr std::uint64_t kRounds = 20;
  NetEnds ends("ucx", {.num_ends = kNumEnds, .num_channels = 2, .gpu_bytes = 2 * kNumEnds * kPart});
  ends.connect();
  std::atomic<int> num_wrong{0};
  std::atomic<int> num_late{0};
  std::atomic<int> num_running{kNumEnds};
  // The part of end `from` in the memory of all others, and behind them the sources.
  const auto part = [](int index) { return static_cast<std::size_t>(index) * kPart; };
  const auto run = [&](int self) {
    NetEnd& end = ends[self];
    end.on_notified = [&, self](int from, int channel, std::uint64_t round) {
      if (channel != 0) return;
      const auto bytes = end.gpu.subspan(part(from), kPart);
      const std::vector<std::byte> seen(bytes.begin(), bytes.end());
      if (seen != net_pattern(kPart, seed_of(from, self, round))) ++num_wrong;
      end.engine->notify(from, 1, round);
    };
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      for (int to = 0; to < kNumEnds; ++to) {
        if (to == self) continue;
        const std::size_t source = part(kNumEnds + to);
        std::ranges::copy(net_pattern(kPart, seed_of(self, to, round)), end.gpu.subspan(source).begin());
        end.engine->put(to, 0, net::kGpuOffset + source, net::kGpuOffset + part(self), kPart);
        end.engine->notify(to, 0, round);
      }
      const bool in_time = poll_alone(end, [&] {
        for (int peer = 0; peer < kNumEnds; ++peer) {
          if (peer != self && (end.highest(peer, 0) < round || end.highest(peer, 1) < round)) return false;
        }
        return true;
      });
      if (!in_time) ++num_late;
    }
    // The others wait for answers of this one.
    --num_running;
    if (!poll_alone(end, [&] { return num_running == 0; })) ++num_late;
  };
  std::vector<std::thread> threads;
  for (int self = 0; self < kNumEnds; ++self) threads.emplace_back(run, self);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
  EXPECT_EQ(num_late, 0);
}

TEST_P(UcxCardModes, AnEndThatClosesIsLostByAllOthersAndItsMemoryIsLeftAlone) {
  NetEnds ends("ucx", {.num_ends = 3, .memory_bytes = 6 * kPart});
  ends.connect();
  for (const int from : {0, 1}) {
    const auto source = ends[from].memory.subspan(3 * kPart);
    std::ranges::copy(net_pattern(source.size(), 1), source.begin());
    for (std::uint64_t i = 1; i <= 3; ++i) {
      ends[from].engine->put(2, 0, 3 * kPart, static_cast<std::size_t>(from) * kPart, kPart);
      ends[from].engine->notify(2, 0, i);
    }
  }
  ends.close({2});
  const std::vector<std::byte> at_close(ends[2].owned);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(2) && ends[1].lost.contains(2); }));
  EXPECT_EQ(ends[0].lost.size(), 1U);
  EXPECT_EQ(ends[1].lost.size(), 1U);
  ends[0].engine->notify(1, 0, 7);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].highest(0, 0) == 7; }));
  EXPECT_EQ(ends[2].owned, at_close);
}

INSTANTIATE_TEST_SUITE_P(
    , UcxCardModes,
    testing::Values(
        Mode{"sleeping", "latency_ns=20000,write_latency_ns=100000,piece_bytes=64"},
        Mode{"spinning", "spin=1,latency_ns=20000,write_latency_ns=100000,piece_bytes=64"},
        Mode{"without_threads", "thread=0,latency_ns=20000,write_latency_ns=100000,piece_bytes=64"},
        Mode{"steady", "steady=1,rate=10000,latency_ns=3000,write_latency_ns=100000,piece_bytes=1073741824"},
        Mode{"steady_spinning",
             "steady=1,spin=1,rate=10000,latency_ns=3000,write_latency_ns=100000,piece_bytes=1073741824"},
        Mode{"steady_without_threads", "steady=1,thread=0,rate=10000,latency_ns=3000,write_latency_ns=100000"},
        Mode{"spinning_without_threads", "steady=1,thread=0,spin=1,rate=10000,latency_ns=3000"}),
    [](const auto& instance) { return std::string(instance.param.name); });

}  // namespace
}  // namespace ferry::test
