/// Waits of single threads and warps for words of latency mode.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/latency/row_words.cuh"
#include "emulator/latency_ranks.hpp"

namespace ferry::emulator {
namespace {

constexpr std::int64_t kLatencyBytes = std::int64_t{24} << 20;
/// One step of the machine's clock.
constexpr std::uint64_t kLateNs = 10'000'000'000;
constexpr int kNumSeeds = 8;
constexpr int kReceiver = 0;
constexpr int kSender = 1;
constexpr std::uint64_t kNumber = 7;
constexpr std::uint32_t kData = 5;

/// Usually the wait ends between two reads of the clock.
TEST(EmulatedLatencyWords, AWaitIsCountedToItsEndWhereTheProgramAsks) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    for (const bool asks : {false, true}) {
      LatencyRanks ranks({.num_ranks = 2, .latency_bytes = kLatencyBytes, .seed = seed, .counts_waits = asks});
      cuda::LatencyParams call;
      call.ranks = ranks.params(kReceiver);
      call.counts_waits = ranks.counts_waits();
      std::uint64_t word = 0;
      cuda::device::Payload received;
      ranks.machine().launch(ranks.stream(kReceiver), {}, [&call, &word, &received] {
        received = cuda::device::wait_payload(call, {cuda::Awaited::kRow, kSender, kNumber}, &word);
      });
      ranks.machine().launch(ranks.stream(kSender), {}, [&word] {
        const std::uint64_t start_ns = now_ns();
        while (now_ns() - start_ns < kLateNs) poll();
        cuda::device::post_word(&word, kNumber, kData);
      });
      ASSERT_EQ(ranks.machine().run(), "");
      EXPECT_TRUE(received.came);
      EXPECT_EQ(received.value, kData);
      const std::uint64_t counted_ns = ranks.report(kReceiver).waits.steps_ns[kSender];
      EXPECT_LE(counted_ns, kLateNs) << "seed " << seed;
      if (asks) {
        EXPECT_EQ(counted_ns, kLateNs) << "seed " << seed;
      }
      EXPECT_EQ(ranks.report(kReceiver).waits.steps_ns[kReceiver], 0U);
    }
  }
}

/// Threads poll the words a few times before they begin to wait.
TEST(EmulatedLatencyWords, AWaitForARowOfWordsIsCountedHoweverShortItIs) {
  // Polls of a warp before the words arrive; each poll takes 1 ns.
  constexpr std::uint64_t kLooksNs = 2000;
  constexpr std::size_t kRowBytes = cuda::kWordStepVectors * cuda::kWordLineBytes;
  constexpr std::uint32_t kTwoOnes = 0x3F803F80;  // bf16
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    LatencyRanks ranks({.num_ranks = 2, .latency_bytes = kLatencyBytes, .seed = seed, .counts_waits = true});
    ranks.machine().let_looks_take(1);
    cuda::LatencyParams call;
    call.ranks = ranks.params(kReceiver);
    call.layout = ranks.layout();
    call.counts_waits = ranks.counts_waits();
    cuda::SentCall sent{};
    sent.number = kNumber;
    cuda::CombineRows rows;
    rows.row_bytes = kRowBytes;
    std::byte* const words = cuda::device::word_row(call, rows, kReceiver, static_cast<int>(sent.set), kSender, 0, 0);
    cuda::device::Terms terms{};
    terms.rows[0] = words;
    std::vector<std::uint32_t> sums(kRowBytes / sizeof(std::uint32_t), 0);
    const GridShape warp{.num_threads = cuda::device::kWarpLanes};
    ranks.machine().launch(ranks.stream(kReceiver), warp, [&] {
      auto* const out = reinterpret_cast<std::byte*>(sums.data());
      EXPECT_TRUE(cuda::device::sum_word_rows<false>(call, sent, terms, 1, out, static_cast<int>(kRowBytes)));
    });
    ranks.machine().launch(ranks.stream(kSender), warp, [words] {
      const std::uint64_t start_ns = now_ns();
      while (now_ns() - start_ns < kLooksNs) poll();
      const uint4 ones{kTwoOnes, kTwoOnes, kTwoOnes, kTwoOnes};
      constexpr int kVectors = cuda::kWordStepVectors;
      cuda::device::LaneWords<kVectors>({ones, ones, ones}, kNumber).store(words, kVectors);
    });
    ASSERT_EQ(ranks.machine().run(), "");
    EXPECT_EQ(sums, std::vector<std::uint32_t>(sums.size(), kTwoOnes)) << "seed " << seed;
    const std::uint64_t counted_ns = ranks.report(kReceiver).waits.steps_ns[kSender];
    EXPECT_GE(counted_ns, kLooksNs / 2) << "seed " << seed;
    EXPECT_LE(counted_ns, 2 * kLooksNs) << "seed " << seed;
  }
}

}  // namespace
}  // namespace ferry::emulator
