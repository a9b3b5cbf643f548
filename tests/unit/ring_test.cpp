/// Rings between two ranks, each with its proxy, over every engine and in several shapes.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "rail/ring.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

using rail::Flow;
using rail::Ring;
using rail::RingShape;

constexpr std::chrono::seconds kDeadline{30};
constexpr int kChunkChannel = 0;
constexpr int kCreditChannel = 1;
constexpr int kFirstRank = 10;

struct RingConfig {
  const char* engine;
  RingShape shape;
};

struct RingEnd {
  std::vector<std::byte> memory;
  net::RingWords words{};
  std::unique_ptr<net::Proxy> proxy;
  std::unique_ptr<Ring> ring;
};

class Rings : public testing::TestWithParam<RingConfig> {
 protected:
  void SetUp() override {
    const RingShape shape = GetParam().shape;
    const std::size_t ring_bytes = shape.num_chunks * shape.chunk_bytes;
    std::vector<net::Blob> addresses;
    for (int self = 0; self < 2; ++self) {
      RingEnd& end = ends_[self];
      end.memory.resize(2 * ring_bytes);  // chunks in, chunks out
      const net::EngineOptions options{.self = self,
                                       .num_peers = 2,
                                       .num_channels = 2,
                                       .memory = end.memory,
                                       .timeout_ns = std::chrono::nanoseconds(kDeadline).count(),
                                       .may_start_receiver = has_receivers(GetParam().engine)};
      auto engine = net_engine(GetParam().engine).create(options).value();
      addresses.push_back(engine->address().value());
      end.proxy = std::make_unique<net::Proxy>(std::move(engine), options, [] {});
      end.proxy->attach_ring(1 - self, {.words = &end.words,
                                        .num_chunks = shape.num_chunks,
                                        .chunk_stride = shape.chunk_bytes,
                                        .send_offset = ring_bytes,
                                        .remote_offset = 0,
                                        .chunk_channel = kChunkChannel,
                                        .credit_channel = kCreditChannel});
      end.ring = std::make_unique<Ring>(Ring::Parts{.proxy = end.proxy.get(),
                                                    .words = &end.words,
                                                    .peer = 1 - self,
                                                    .peer_rank = kFirstRank + 1 - self,
                                                    .chunks_in = end.memory.data(),
                                                    .chunks_out = end.memory.data() + ring_bytes,
                                                    .shape = shape});
    }
    for (RingEnd& end : ends_) throw_if_error(end.proxy->start(addresses));
  }
  void TearDown() override {
    std::thread other([this] { ends_[1].proxy = nullptr; });
    ends_[0].proxy = nullptr;
    other.join();
  }

  RingEnd& end(int self) { return ends_[self]; }
  Ring& ring(int self) { return *ends_[self].ring; }

  /// Returns true if `condition` holds in time; polls the network if this thread drives it.
  bool await(int self, const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      if (!end(self).proxy->progress()) std::this_thread::yield();
    }
    return true;
  }

  /// Commits batches until the peer has to use a chunk first or all are committed. Item i is filled with its number.
  static int commit_all(Ring& ring, std::size_t item_bytes) {
    int num_chunks = 0;
    for (Ring::Batch batch = ring.reserve(); batch.num_items > 0; batch = ring.reserve(), ++num_chunks) {
      for (std::int64_t i = 0; i < batch.num_items; ++i) {
        std::fill_n(batch.to + static_cast<std::size_t>(i) * item_bytes, item_bytes,
                    static_cast<std::byte>(batch.first + i));
      }
      ring.commit(batch);
    }
    return num_chunks;
  }

  /// Takes half of the items at the front, at least one. Returns true if there was one.
  static bool take(Ring& ring, std::size_t item_bytes, std::int64_t* next, int* num_wrong) {
    const std::span<const std::byte> items = ring.front();
    if (items.empty()) return false;
    const auto num_items = static_cast<std::int64_t>(items.size() / item_bytes);
    const std::int64_t count = std::max<std::int64_t>(1, num_items / 2);
    for (std::int64_t i = 0; i < count; ++i, ++*next) {
      const auto item = items.subspan(static_cast<std::size_t>(i) * item_bytes, item_bytes);
      const auto expected = static_cast<std::byte>(*next);
      if (!std::ranges::all_of(item, [expected](std::byte value) { return value == expected; })) ++*num_wrong;
    }
    ring.release(count);
    return true;
  }

  /// One end of exchanges of several sizes in both directions. Returns the number of wrong items, -1 after the
  /// deadline.
  int run_exchanges(int self) {
    int num_wrong = 0;
    for (const std::int64_t num_items : {std::int64_t{1}, std::int64_t{0}, std::int64_t{500}, std::int64_t{37}}) {
      const std::size_t out_bytes = self == 0 ? 48 : 16;
      const std::size_t in_bytes = self == 0 ? 16 : 48;
      ring(self).begin({num_items, num_items, out_bytes, in_bytes});
      std::int64_t next = 0;
      const bool done = await(self, [&] {
        commit_all(ring(self), out_bytes);
        while (take(ring(self), in_bytes, &next, &num_wrong)) {
        }
        return ring(self).finished() || !ring(self).fault().ok();
      });
      if (!done || !ring(self).fault().ok() || next != num_items) return -1;
    }
    return num_wrong;
  }

 private:
  RingEnd ends_[2];
};

TEST_P(Rings, ItemsArriveInOrderBothWays) {
  int other = -1;
  std::thread peer([&] { other = run_exchanges(1); });
  EXPECT_EQ(run_exchanges(0), 0);
  peer.join();
  EXPECT_EQ(other, 0);
  EXPECT_EQ(end(0).words.num_filled, end(1).words.arrived);
  EXPECT_EQ(end(1).words.num_used, end(1).words.arrived);
}

TEST_P(Rings, ARankMayDriveTheNetworkItself) {
  int other = -1;
  std::thread peer([&] { other = run_exchanges(1); });
  end(0).proxy->acquire();
  EXPECT_EQ(run_exchanges(0), 0);
  end(0).proxy->release();
  peer.join();
  EXPECT_EQ(other, 0);
}

TEST_P(Rings, AProducerIsHeldBackUntilAChunkIsUsed) {
  const auto num_chunks = static_cast<int>(GetParam().shape.num_chunks);
  // Large chunks are filled by long exchanges.
  const std::size_t chunk_bytes = std::min(GetParam().shape.chunk_bytes, rail::kMaxChunkBytes);
  const auto items_per_chunk = static_cast<std::int64_t>((chunk_bytes - rail::kChunkHeaderBytes) / 16);
  const std::int64_t num_items = (num_chunks + 1) * items_per_chunk;
  ring(0).begin({num_items, 0, 16, 16});
  ring(1).begin({0, num_items, 16, 16});
  EXPECT_EQ(commit_all(ring(0), 16), num_chunks);
  ASSERT_TRUE(await(1, [&] { return !ring(1).front().empty(); }));
  EXPECT_EQ(ring(0).reserve().num_items, 0) << "a chunk has arrived, but none is used";
  ring(1).release(items_per_chunk - 1);
  EXPECT_EQ(ring(1).front().size(), 16U);
  ring(1).release(1);
  ASSERT_TRUE(await(0, [&] { return ring(0).reserve().num_items == items_per_chunk; }));
  EXPECT_EQ(commit_all(ring(0), 16), 1);
  EXPECT_EQ(ring(0).reserve().num_items, 0);
  EXPECT_TRUE(ring(0).finished());
}

TEST_P(Rings, AnotherNumberOfItemsThanAgreedIsRefusedAndNamesTheSender) {
  ring(0).begin({3, 0, 16, 16});
  ring(1).begin({0, 2, 16, 16});
  commit_all(ring(0), 16);
  ASSERT_TRUE(await(1, [&] { return ring(1).front().empty() && !ring(1).fault().ok(); }));
  EXPECT_EQ(ring(1).fault().code(), ErrorCode::kTransport);
  EXPECT_EQ(ring(1).fault().peer(), kFirstRank);
  EXPECT_TRUE(ring(1).front().empty());
  EXPECT_FALSE(ring(1).finished());
}

TEST_P(Rings, AClosedRingHasDeliveredWhatWasFilledBefore) {
  ring(0).begin({5, 0, 16, 16});
  commit_all(ring(0), 16);
  end(0).proxy->close_ring(1);
  std::atomic_ref<std::uint64_t> closed(end(1).words.closed);
  ASSERT_TRUE(await(1, [&] { return closed.load(std::memory_order_acquire) == 1; }));
  EXPECT_EQ(std::atomic_ref(end(1).words.arrived).load(std::memory_order_acquire), 1U);
}

TEST_P(Rings, TrafficCountsWhatWasFilledOnceThePathsAreKnown) {
  ring(0).begin({4, 0, 16, 16});
  commit_all(ring(0), 16);
  EXPECT_EQ(end(0).proxy->paths().size(), 1U);
  const net::PeerTraffic traffic = end(0).proxy->traffic(1);
  EXPECT_EQ(traffic.put_bytes, rail::kChunkHeaderBytes + 64);
  EXPECT_EQ(traffic.num_puts, 1U);
  EXPECT_EQ(traffic.num_notifies, 1U);
}

TEST(RingShapes, OfGpuRanksHaveChunksOf512KiBWithinABudget) {
  constexpr std::size_t kKiB = 1024;
  for (const std::size_t num_nodes : {std::size_t{2}, std::size_t{9}, std::size_t{10}, std::size_t{32}}) {
    const RingShape shape = rail::kernel_ring_shape(num_nodes);
    EXPECT_EQ(shape.num_chunks, 16U);
    EXPECT_EQ(shape.chunk_bytes % plan::kPartAlignment, 0U);
    EXPECT_LE(2 * (num_nodes - 1) * shape.num_chunks * shape.chunk_bytes, 128 * kKiB * kKiB);
    EXPECT_EQ(shape.chunk_bytes == 512 * kKiB, num_nodes <= 9) << num_nodes;
    EXPECT_EQ(rail::default_ring_shape(num_nodes).num_chunks, 4U) << "CPU ranks have rings of their own shape";
    EXPECT_LE(rail::default_ring_shape(num_nodes).chunk_bytes, 128 * kKiB);
  }
}

TEST(RingShapes, InGpuMemoryAreTwiceAsLarge) {
  for (const std::size_t num_nodes : {std::size_t{2}, std::size_t{9}, std::size_t{10}, std::size_t{32}}) {
    const RingShape host = rail::kernel_ring_shape(num_nodes);
    const RingShape gpu = rail::gpu_ring_shape(num_nodes);
    EXPECT_EQ(gpu.num_chunks, host.num_chunks);
    EXPECT_NEAR(static_cast<double>(gpu.chunk_bytes), 2.0 * static_cast<double>(host.chunk_bytes),
                static_cast<double>(2 * plan::kPartAlignment));
  }
}

/// A short exchange has chunks of 128 KiB or, in a ring with smaller chunks, of their size. A longer exchange has
/// larger chunks once it fills sixteen of them.
TEST(RingShapes, ShortExchangesUseSmallerChunks) {
  constexpr std::size_t kKiB = 1024;
  EXPECT_EQ(rail::exchange_chunk_bytes(512 * kKiB, 0), 128 * kKiB);
  EXPECT_EQ(rail::exchange_chunk_bytes(512 * kKiB, 2048 * kKiB), 128 * kKiB);
  EXPECT_EQ(rail::exchange_chunk_bytes(512 * kKiB, 4096 * kKiB), 256 * kKiB);
  EXPECT_EQ(rail::exchange_chunk_bytes(512 * kKiB, 4096 * kKiB + 1000), 256 * kKiB) << "a multiple of 64";
  EXPECT_EQ(rail::exchange_chunk_bytes(512 * kKiB, std::size_t{1} << 40), 512 * kKiB);
  EXPECT_EQ(rail::exchange_chunk_bytes(128 * kKiB, std::size_t{1} << 40), 128 * kKiB);
  EXPECT_EQ(rail::exchange_chunk_bytes(8 * kKiB, 100), 8 * kKiB);
}

std::vector<RingConfig> configs() {
  std::vector<RingConfig> all;
  for (const char* engine : {FERRY_TEST_ENGINES}) {
    for (const RingShape& shape :
         {RingShape{1, 128}, RingShape{4, 1024}, RingShape{64, 256}, RingShape{3, std::size_t{512} << 10}}) {
      all.push_back({engine, shape});
    }
  }
  return all;
}

std::string config_name(const testing::TestParamInfo<RingConfig>& config) {
  return std::string(config.param.engine) + "_" + std::to_string(config.param.shape.num_chunks) + "_chunks";
}

INSTANTIATE_TEST_SUITE_P(Engines, Rings, testing::ValuesIn(configs()), config_name);

}  // namespace
}  // namespace ferry::test
