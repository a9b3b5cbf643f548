/// Proxies of several ranks in one process, each with its own thread, over every engine.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "net/proxy.hpp"
#include "support/loopback_faults.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

constexpr std::chrono::seconds kPatience{30};

/// A rank's use of a proxy: it sleeps until the proxy rings and the condition holds.
class Bell {
 public:
  void ring() {
    {
      const std::lock_guard lock(mutex_);
      ++num_rings_;
    }
    rung_.notify_all();
  }
  template <typename Condition>
  bool wait(Condition condition) {
    std::unique_lock lock(mutex_);
    return rung_.wait_for(lock, kPatience, condition);
  }

 private:
  std::mutex mutex_;
  std::condition_variable rung_;
  int num_rings_ = 0;
};

struct ProxyRank {
  std::vector<std::byte> memory;
  Bell bell;
  std::unique_ptr<net::Proxy> proxy;

  bool await(int peer, int channel, std::uint64_t value) {
    return bell.wait([&] { return proxy->received(peer, channel) >= value; });
  }
  bool await_loss(int peer) {
    return bell.wait([&] { return !proxy->peer_status(peer).ok(); });
  }
};

class NetProxy : public testing::TestWithParam<const char*> {
 protected:
  void start(const NetShape& shape) {
    std::vector<net::Blob> addresses;
    for (int self = 0; self < shape.num_ends; ++self) {
      auto rank = std::make_unique<ProxyRank>();
      rank->memory.resize(shape.memory_bytes);
      const net::EngineOptions options{.self = self,
                                       .num_peers = shape.num_ends,
                                       .num_channels = shape.num_channels,
                                       .memory = rank->memory,
                                       .timeout_ns = shape.timeout_ns,
                                       .may_start_receiver = has_receivers(GetParam())};
      auto engine = net_engine(GetParam()).create(options).value();
      addresses.push_back(engine->address().value());
      Bell* bell = &rank->bell;
      rank->proxy = std::make_unique<net::Proxy>(std::move(engine), options, [bell] { bell->ring(); });
      ranks_.push_back(std::move(rank));
    }
    for (const auto& rank : ranks_) throw_if_error(rank->proxy->start(addresses));
  }
  void TearDown() override { end_all(); }

  ProxyRank& rank(int index) { return *ranks_[static_cast<std::size_t>(index)]; }
  /// Ends all ranks at the same time, as the ranks of a group leave.
  void end_all() {
    std::vector<std::thread> enders;
    for (const auto& rank : ranks_) enders.emplace_back([&rank] { rank->proxy = nullptr; });
    for (std::thread& ender : enders) ender.join();
  }

 private:
  std::vector<std::unique_ptr<ProxyRank>> ranks_;
};

std::string engine_name(const testing::TestParamInfo<const char*>& info) { return info.param; }

/// Runs `play` as both ranks at once; it returns the number of wrong values received.
template <typename Play>
void expect_both_right(Play play) {
  int other = -1;
  std::thread second([&] { other = play(1); });
  EXPECT_EQ(play(0), 0);
  second.join();
  EXPECT_EQ(other, 0);
}

TEST_P(NetProxy, PingPongWithPayload) {
  constexpr std::uint64_t kRounds = 300;
  constexpr std::size_t kBytes = 3000;
  start({.memory_bytes = 2 * kBytes});
  const auto play = [&](int self) {
    ProxyRank& mine = rank(self);
    int num_wrong = 0;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      if (self == 1) {
        if (!mine.await(0, 0, round)) return -1;
        if (!std::ranges::equal(net_pattern(kBytes, round), std::span(mine.memory).subspan(kBytes))) ++num_wrong;
      }
      std::ranges::copy(net_pattern(kBytes, round + static_cast<std::uint64_t>(self) * kRounds), mine.memory.begin());
      mine.proxy->put(1 - self, 0, 0, kBytes, kBytes);
      mine.proxy->notify(1 - self, 0, round);
      if (self == 0) {
        if (!mine.await(1, 0, round)) return -1;
        if (!std::ranges::equal(net_pattern(kBytes, round + kRounds), std::span(mine.memory).subspan(kBytes))) {
          ++num_wrong;
        }
      }
    }
    return num_wrong;
  };
  expect_both_right(play);
  const net::PeerTraffic traffic = rank(0).proxy->traffic(1);
  EXPECT_EQ(traffic.num_puts, kRounds);
  EXPECT_EQ(traffic.put_bytes, kRounds * kBytes);
  EXPECT_EQ(traffic.num_notifies, kRounds);
  EXPECT_TRUE(rank(0).proxy->peer_status(1).ok());
}

TEST_P(NetProxy, ReceivedNeverDecreases) {
  constexpr std::uint64_t kNumValues = 3000;
  start({.num_channels = 2, .memory_bytes = 4096});
  std::thread sender([&] {
    for (std::uint64_t value = 1; value <= kNumValues; ++value) {
      if (value % 7 == 0) rank(0).proxy->put(1, 1, 0, 64, 64);
      rank(0).proxy->notify(1, 1, value);
    }
  });
  std::uint64_t last = 0;
  bool went_back = false;
  EXPECT_TRUE(rank(1).bell.wait([&] {
    const std::uint64_t now = rank(1).proxy->received(0, 1);
    went_back |= now < last;
    last = now;
    return now == kNumValues;
  }));
  sender.join();
  EXPECT_FALSE(went_back);
  EXPECT_EQ(rank(1).proxy->received(0, 0), 0U);
}

TEST_P(NetProxy, WakesAfterALongSleep) {
  start({});
  rank(0).proxy->notify(1, 0, 1);
  ASSERT_TRUE(rank(1).await(0, 0, 1));
  // Longer than any spinning, so that both threads sleep.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  rank(1).proxy->notify(0, 0, 2);
  EXPECT_TRUE(rank(0).await(1, 0, 2));
}

TEST_P(NetProxy, LossWakesARankThatWaits) {
  start({.num_ends = 3});
  for (int from = 0; from < 3; ++from) {
    for (int to = 0; to < 3; ++to) {
      if (from != to) rank(from).proxy->notify(to, 0, 1);
    }
  }
  for (int to = 0; to < 3; ++to) {
    for (int from = 0; from < 3; ++from) {
      if (from == to) continue;
      ASSERT_TRUE(rank(to).await(from, 0, 1));
    }
  }
  std::thread leaver([&] { rank(2).proxy = nullptr; });
  for (int survivor : {0, 1}) {
    EXPECT_TRUE(rank(survivor).await_loss(2));
    const Status status = rank(survivor).proxy->peer_status(2);
    EXPECT_EQ(status.code(), ErrorCode::kPeerLost) << status.to_string();
    EXPECT_EQ(status.peer(), 2);
    rank(survivor).proxy->put(2, 0, 0, 0, 100);
    rank(survivor).proxy->notify(2, 0, 9);
  }
  leaver.join();
  rank(0).proxy->notify(1, 0, 5);
  EXPECT_TRUE(rank(1).await(0, 0, 5));
  EXPECT_TRUE(rank(0).proxy->peer_status(1).ok());
}

TEST_P(NetProxy, PathsAreAnsweredByTheThread) {
  start({.num_ends = 3});
  EXPECT_EQ(rank(1).proxy->paths().size(), 2U);
}

/// Drives the engine as a rank does itself: it polls and sleeps instead of being woken.
template <typename Condition>
bool drive_until(net::Proxy& proxy, Condition condition) {
  constexpr std::int64_t kNapNs = 100'000'000;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    if (!proxy.progress()) proxy.sleep(kNapNs);
  }
  return true;
}

TEST_P(NetProxy, RanksAcquireAndReleaseTheEngine) {
  constexpr std::uint64_t kRounds = 300;
  constexpr std::size_t kBytes = 3000;
  start({.memory_bytes = 2 * kBytes});
  const auto play = [&](int self) {
    ProxyRank& mine = rank(self);
    const int peer = 1 - self;
    int num_wrong = 0;
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      // All four combinations of hand and thread, in all orders; operations queued before acquire() are sent too.
      const bool by_hand = (round >> self & 1) != 0;
      const bool too_late = round % 3 == 0;
      const auto arrived = [&] { return mine.proxy->received(peer, 0) >= round; };
      const auto send = [&] {
        std::ranges::copy(net_pattern(kBytes, round + static_cast<std::uint64_t>(self) * kRounds), mine.memory.begin());
        mine.proxy->put(peer, 0, 0, kBytes, kBytes);
        mine.proxy->notify(peer, 0, round);
      };
      const auto receive = [&] {
        if (by_hand ? !drive_until(*mine.proxy, arrived) : !mine.bell.wait(arrived)) return false;
        const std::uint64_t seed = round + static_cast<std::uint64_t>(peer) * kRounds;
        if (!std::ranges::equal(net_pattern(kBytes, seed), std::span(mine.memory).subspan(kBytes))) ++num_wrong;
        return true;
      };
      if (by_hand && !too_late) mine.proxy->acquire();
      if (self == 0) send();
      if (by_hand && too_late) mine.proxy->acquire();
      if (!receive()) return -1;
      if (self == 1) send();
      if (by_hand) mine.proxy->release();
    }
    return num_wrong;
  };
  expect_both_right(play);
  EXPECT_EQ(rank(0).proxy->traffic(1).num_notifies, kRounds);
}

TEST_P(NetProxy, OnlyTheDriverMovesAnything) {
  start({});
  EXPECT_FALSE(rank(0).proxy->progress());
  EXPECT_FALSE(rank(0).proxy->sleep(0));
  rank(0).proxy->acquire();
  EXPECT_EQ(rank(0).proxy->paths().size(), 1U);
  rank(1).proxy->notify(0, 0, 1);
  EXPECT_TRUE(drive_until(*rank(0).proxy, [&] { return rank(0).proxy->received(1, 0) == 1; }));
  EXPECT_TRUE(rank(0).proxy->sleep(0));
  rank(0).proxy->release();
  EXPECT_FALSE(rank(0).proxy->progress());
  // The proxy's thread drives the engine again after release().
  rank(1).proxy->notify(0, 0, 2);
  EXPECT_TRUE(rank(0).await(1, 0, 2));
}

TEST_P(NetProxy, TheDriverIsNotifiedOfALoss) {
  start({});
  rank(0).proxy->notify(1, 0, 1);
  rank(1).proxy->notify(0, 0, 1);
  ASSERT_TRUE(rank(0).await(1, 0, 1));
  ASSERT_TRUE(rank(1).await(0, 0, 1));
  rank(0).proxy->acquire();
  std::thread leaver([&] { rank(1).proxy = nullptr; });
  EXPECT_TRUE(drive_until(*rank(0).proxy, [&] { return !rank(0).proxy->peer_status(1).ok(); }));
  EXPECT_EQ(rank(0).proxy->peer_status(1).code(), ErrorCode::kPeerLost);
  rank(0).proxy->notify(1, 0, 2);
  rank(0).proxy->release();
  leaver.join();
}

TEST_P(NetProxy, DestroyedOneAfterTheOther) {
  start({.num_ends = 3, .memory_bytes = 1 << 20});
  for (int from = 0; from < 3; ++from) {
    rank(from).proxy->put((from + 1) % 3, 0, 0, 1 << 19, 1 << 19);
    rank(from).proxy->notify((from + 1) % 3, 0, 1);
  }
  for (int index : {1, 0, 2}) rank(index).proxy = nullptr;
}

TEST_P(NetProxy, NeverStarted) {
  std::vector<std::byte> memory(64);
  const net::EngineOptions options{.self = 0, .num_peers = 2, .num_channels = 1, .memory = memory, .timeout_ns = 0};
  net::Proxy proxy(net_engine(GetParam()).create(options).value(), options, [] {});
  proxy.put(1, 0, 0, 0, 10);
  proxy.notify(1, 0, 1);
  EXPECT_TRUE(proxy.paths().empty());
  EXPECT_EQ(proxy.received(1, 0), 0U);
  EXPECT_EQ(proxy.start(std::vector<net::Blob>(2)).code(), ErrorCode::kTransport);
}

class NetProxyWithFaults : public NetProxy {};

TEST_P(NetProxyWithFaults, FaultsReachThreadsThatSleep) {
  net::LoopbackFaults faults;
  start({.num_ends = 3, .memory_bytes = 4096});
  faults.hold(0, 1);
  rank(0).proxy->notify(1, 0, 1);
  rank(0).proxy->notify(2, 0, 1);
  ASSERT_TRUE(rank(2).await(0, 0, 1));
  EXPECT_EQ(rank(1).proxy->received(0, 0), 0U);
  faults.release(0, 1);
  EXPECT_TRUE(rank(1).await(0, 0, 1));
  faults.cut(0, 1);
  EXPECT_TRUE(rank(0).await_loss(1));
  EXPECT_TRUE(rank(1).await_loss(0));
  EXPECT_EQ(rank(1).proxy->peer_status(0).code(), ErrorCode::kTransport);
  EXPECT_TRUE(rank(2).proxy->peer_status(0).ok());
}

INSTANTIATE_TEST_SUITE_P(Loopback, NetProxyWithFaults, testing::Values("loopback"), engine_name);
INSTANTIATE_TEST_SUITE_P(Engines, NetProxy, testing::Values(FERRY_TEST_ENGINES), engine_name);

/// An engine without a descriptor that reports invalid events, which the proxy must handle.
class OddEngine final : public net::Engine {
 public:
  explicit OddEngine(std::atomic<std::uint64_t>* num_polls) : num_polls_(num_polls) {}
  std::string_view name() const override { return "odd"; }
  std::span<std::byte> memory() const override { return {}; }
  Result<net::Blob> address() const override { return net::Blob{}; }
  Status connect(std::span<const net::Blob> /*addresses*/, net::EngineEvents events) override {
    events_ = std::move(events);
    return {};
  }
  void put(int, int, std::size_t, std::size_t, std::size_t) override {}
  void notify(int peer, int channel, std::uint64_t value) override { events_.notified(peer, channel, value); }
  void put_from(int, int, std::span<const std::byte>, std::size_t) override {}
  void get(int, std::span<std::byte>, std::size_t, std::uint64_t) override {}
  void atomic(int, int, const net::AtomicOp&, std::uint64_t) override {}
  void flush(int, std::uint64_t) override {}
  void forget(std::uint64_t) override {}
  bool poll() override {
    if (++*num_polls_ == 1) {
      events_.notified(-1, 0, 5);
      events_.notified(2, 0, 5);
      events_.notified(1, -1, 5);
      events_.notified(1, 1, 5);
      events_.lost(7, Status(ErrorCode::kPeerLost, "no such peer", 7));
      events_.lost(-1, Status(ErrorCode::kPeerLost, "no such peer"));
    }
    return false;
  }
  bool flushed(int) const override { return true; }
  int event_fd() const override { return -1; }
  bool arm() override { return true; }
  std::vector<net::Path> paths() const override { return {}; }
  void limit_close_time(std::int64_t /*timeout_ns*/) override {}
  void close() override {}

 private:
  std::atomic<std::uint64_t>* num_polls_;
  net::EngineEvents events_;
};

TEST(NetProxyAlone, EventsOutOfRangeAreIgnoredAndPollingBacksOff) {
  std::atomic<std::uint64_t> num_polls{0};
  Bell bell;
  const net::EngineOptions options{.self = 0, .num_peers = 2, .num_channels = 1, .memory = {}, .timeout_ns = 0};
  net::Proxy proxy(std::make_unique<OddEngine>(&num_polls), options, [&bell] { bell.ring(); });
  ASSERT_TRUE(proxy.start(std::vector<net::Blob>(2)).ok());
  proxy.notify(1, 0, 3);
  EXPECT_TRUE(bell.wait([&] { return proxy.received(1, 0) == 3; }));
  proxy.notify(1, 0, 2);
  EXPECT_EQ(proxy.paths().size(), 0U);  // queued after the notify, which has therefore been executed
  EXPECT_EQ(proxy.received(1, 0), 3U);
  EXPECT_TRUE(proxy.peer_status(1).ok());
  const std::uint64_t before = num_polls;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_LT(num_polls - before, 2000U);  // continuous polling would make millions
}

}  // namespace
}  // namespace ferry::test
