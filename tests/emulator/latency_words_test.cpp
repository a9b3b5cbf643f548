/// Waits of single threads for words of latency mode.

#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/latency/words.cuh"
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

/// Most of the times it ends between two looks at the clock.
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

}  // namespace
}  // namespace ferry::emulator
