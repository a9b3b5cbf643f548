/// A ring between two ranks, each end served by a kernel or a thread, in every combination; the proxies between them
/// treat both alike. The network is the loopback engine over pinned memory.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu/ring_kernels.hpp"
#include "plan/to_size.hpp"
#include "rail/ring.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

using rail::Ring;
using rail::RingShape;

constexpr std::int64_t kTimeoutNs = 20'000'000'000;
constexpr std::uint64_t kNumRounds = 2000;
constexpr std::uint32_t kItemBytes = 64;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// Zeroed host memory that kernels reach.
template <typename T>
class Pinned {
 public:
  explicit Pinned(std::size_t count) : count_(count) {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(memory, 0, count * sizeof(T));
    data_ = static_cast<T*>(memory);
  }
  ~Pinned() { cudaFreeHost(data_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  T* get() const { return data_; }
  std::span<T> span() const { return {data_, count_}; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

struct RingCase {
  RingShape shape;
  bool kernel_fills;
  bool kernel_drains;
};

class RingOnGpu : public testing::TestWithParam<RingCase> {
 protected:
  void SetUp() override {
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) GTEST_SKIP() << "needs a GPU";
    counters_ = std::make_unique<Pinned<std::uint32_t>>(2);
    shape_ = GetParam().shape;
    ring_bytes_ = shape_.num_chunks * shape_.chunk_bytes;
    std::vector<net::Blob> addresses;
    for (int self = 0; self < 2; ++self) {
      memory_[to_size(self)] = std::make_unique<Pinned<std::byte>>(2 * ring_bytes_);
      words_[to_size(self)] = std::make_unique<Pinned<net::RingWords>>(1);
      const net::EngineOptions options{.self = self,
                                       .num_peers = 2,
                                       .num_channels = 2,
                                       .memory = memory_[to_size(self)]->span(),
                                       .timeout_ns = kTimeoutNs};
      auto engine = net_engine("loopback").create(options).value();
      addresses.push_back(engine->address().value());
      proxies_[to_size(self)] = std::make_unique<net::Proxy>(std::move(engine), options, [] {});
      proxies_[to_size(self)]->attach_ring(1 - self, {.words = words_[to_size(self)]->get(),
                                                      .num_chunks = shape_.num_chunks,
                                                      .chunk_stride = shape_.chunk_bytes,
                                                      .send_offset = ring_bytes_,
                                                      .remote_offset = 0,
                                                      .chunk_channel = 0,
                                                      .credit_channel = 1});
    }
    for (auto& proxy : proxies_) {
      throw_if_error(proxy->start(addresses));
      proxy->keep_polling(true);
    }
    num_items_ = static_cast<std::uint32_t>((shape_.chunk_bytes - rail::kChunkHeaderBytes) / kItemBytes);
  }
  void TearDown() override {
    std::thread other([this] { proxies_[1] = nullptr; });
    proxies_[0] = nullptr;
    other.join();
  }

  RingKernelParams params(int self, std::byte* chunks) const {
    return {.words = words_[to_size(self)]->get(),
            .chunks = chunks,
            .num_chunks = shape_.num_chunks,
            .chunk_bytes = shape_.chunk_bytes,
            .num_rounds = kNumRounds,
            .num_items = num_items_,
            .item_bytes = kItemBytes,
            .timeout_ns = kTimeoutNs,
            .num_wrong = &counters_->get()[0],
            .num_expired = &counters_->get()[1]};
  }
  Ring ring_of(int self) const {
    return Ring({.proxy = proxies_[to_size(self)].get(),
                 .words = words_[to_size(self)]->get(),
                 .peer = 1 - self,
                 .peer_rank = 1 - self,
                 .chunks_in = memory_[to_size(self)]->get(),
                 .chunks_out = memory_[to_size(self)]->get() + ring_bytes_,
                 .shape = shape_});
  }
  std::int64_t total_items() const { return static_cast<std::int64_t>(kNumRounds) * num_items_; }

  void fill_by_thread() {
    Ring ring = ring_of(0);
    ring.begin({total_items(), 0, kItemBytes, kItemBytes});
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kTimeoutNs);
    std::uint64_t round = 0;
    while (!ring.finished() && std::chrono::steady_clock::now() < deadline) {
      const Ring::Batch batch = ring.reserve();
      if (batch.num_items == 0) continue;
      const std::size_t num_words = static_cast<std::size_t>(batch.num_items) * kItemBytes / sizeof(std::uint32_t);
      auto* const words = reinterpret_cast<std::uint32_t*>(batch.to);
      for (std::size_t word = 0; word < num_words; ++word) words[word] = ring_pattern(round, word);
      ring.commit(batch);
      ++round;
    }
    EXPECT_TRUE(ring.finished());
  }
  void drain_by_thread() {
    Ring ring = ring_of(1);
    ring.begin({0, total_items(), kItemBytes, kItemBytes});
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kTimeoutNs);
    std::uint64_t round = 0;
    std::size_t num_wrong = 0;
    while (!ring.finished() && ring.fault().ok() && std::chrono::steady_clock::now() < deadline) {
      const std::span<const std::byte> items = ring.front();
      if (items.empty()) continue;
      const auto* const words = reinterpret_cast<const std::uint32_t*>(items.data());
      for (std::size_t word = 0; word < items.size() / sizeof(std::uint32_t); ++word) {
        num_wrong += words[word] != ring_pattern(round, word) ? 1U : 0U;
      }
      ring.release(static_cast<std::int64_t>(items.size() / kItemBytes));
      ++round;
    }
    EXPECT_TRUE(ring.finished()) << ring.fault().to_string();
    EXPECT_EQ(num_wrong, 0U);
  }

  RingShape shape_;
  std::size_t ring_bytes_ = 0;
  std::uint32_t num_items_ = 0;
  std::array<std::unique_ptr<Pinned<std::byte>>, 2> memory_;
  std::array<std::unique_ptr<Pinned<net::RingWords>>, 2> words_;
  std::array<std::unique_ptr<net::Proxy>, 2> proxies_;
  std::unique_ptr<Pinned<std::uint32_t>> counters_;
};

TEST_P(RingOnGpu, EveryChunkArrivesWholeAndInOrder) {
  const Stream fill_stream;
  const Stream drain_stream;
  std::vector<std::thread> threads;
  if (GetParam().kernel_drains) {
    check(launch_drain_ring(params(1, memory_[1]->get()), drain_stream.get()));
  } else {
    threads.emplace_back([this] { drain_by_thread(); });
  }
  if (GetParam().kernel_fills) {
    check(launch_fill_ring(params(0, memory_[0]->get() + ring_bytes_), fill_stream.get()));
  } else {
    threads.emplace_back([this] { fill_by_thread(); });
  }
  for (std::thread& thread : threads) thread.join();
  check(cudaStreamSynchronize(fill_stream.get()));
  check(cudaStreamSynchronize(drain_stream.get()));
  EXPECT_EQ(counters_->get()[0], 0U) << "words that differ from the pattern";
  EXPECT_EQ(counters_->get()[1], 0U) << "waits of kernels that expired";
  EXPECT_EQ(words_[1]->get()->used[(kNumRounds - 1) % shape_.num_chunks], kNumRounds);
}

std::vector<RingCase> cases() {
  std::vector<RingCase> all;
  for (const RingShape& shape : {RingShape{1, 1024}, RingShape{4, 16384}, RingShape{16, 4096}}) {
    all.push_back({shape, true, false});
    all.push_back({shape, false, true});
    all.push_back({shape, true, true});
  }
  return all;
}

std::string case_name(const testing::TestParamInfo<RingCase>& info) {
  return fmt::format("{}_fills_{}_drains_{}_chunks", info.param.kernel_fills ? "kernel" : "thread",
                     info.param.kernel_drains ? "kernel" : "thread", info.param.shape.num_chunks);
}

INSTANTIATE_TEST_SUITE_P(Ends, RingOnGpu, testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace ferry::test
