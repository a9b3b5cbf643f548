/// Network requests of one-sided calls: those of kernels, and those of kernels that implement host calls.

#include "ferry/device/one_sided.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/one_sided/kernels.hpp"
#include "emulator/one_sided_case.hpp"

namespace ferry::emulator {
namespace {

using device::Code;
using device::Scope;
using device::World;

class OneSidedHostCalls : public OnNodes {};
INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedHostCalls, all_shapes(), shape_name);

TEST_P(OneSidedHostCalls, CallsOfTheHostAreKernels) {
  OneSidedRanks::Options options = this->options(1);
  options.heap_bytes = std::uint64_t{256} << 10;
  constexpr std::uint64_t kNumBytes = 70'000;  // more than one block's share
  OneSidedRanks ranks(options);
  const auto num_ranks = static_cast<std::size_t>(ranks.num_ranks());
  std::vector<std::vector<std::byte>> mine(num_ranks, std::vector<std::byte>(kNumBytes));
  std::vector<std::vector<std::byte>> got(num_ranks, std::vector<std::byte>(kNumBytes));
  std::vector<std::uint64_t> fetched(num_ranks);
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    const auto me = static_cast<std::size_t>(rank);
    for (std::size_t b = 0; b < kNumBytes; ++b) mine[me][b] = pattern(rank, 0, b);
    const int next = (rank + 1) % ranks.num_ranks();
    const cudaStream_t stream = ranks.stream(rank);
    cuda::CopyParams copy;
    copy.world = ranks.world(rank);
    copy.rank = next;
    copy.symmetric = ranks.heap(rank) + kRowOffset;
    copy.own = mine[me].data();
    copy.num_bytes = kNumBytes;
    EXPECT_EQ(cuda::share_copy(copy, 4), 2U);
    cuda::launch_put(copy, stream);
    cuda::WordParams word;
    word.world = copy.world;
    word.rank = next;
    word.word = ranks.word(rank, kSignal);
    word.call = cuda::WordCall::kSignal;
    word.value = 3;
    cuda::launch_word_call(word, stream);
    word.call = cuda::WordCall::kWaitUntil;
    cuda::launch_word_call(word, stream);
    word.call = cuda::WordCall::kQuiet;
    cuda::launch_word_call(word, stream);
    copy.own = got[me].data();
    cuda::launch_get(copy, stream);  // this rank's own bytes, returned by the next rank
    word.call = cuda::WordCall::kFetchAdd;
    word.rank = 0;
    word.word = ranks.word(rank, kCounter);
    word.fetched = &fetched[me];
    cuda::launch_word_call(word, stream);
    cuda::launch_barrier({copy.world, ranks.team(rank)}, stream);
  }
  ASSERT_EQ(ranks.run(), "");
  EXPECT_TRUE(got == mine);
  EXPECT_EQ(*ranks.word(0, kCounter), 3 * num_ranks);
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) EXPECT_EQ(ranks.errors(rank).state, 0U);
}

TEST_P(OneSidedHostCalls, AHostsPutAndSignalFromSymmetricMemoryAreOneRequest) {
  OneSidedRanks::Options options = this->options(1);
  options.heap_bytes = std::uint64_t{512} << 10;
  constexpr std::uint64_t kNumBytes = 170'000;  // more than one block's share
  constexpr std::uint64_t kSourceOffset = std::uint64_t{256} << 10;
  OneSidedRanks ranks(options);
  const int last = ranks.num_ranks() - 1;
  const bool by_request = over_network();
  std::byte* const source = ranks.heap(0) + kSourceOffset;
  for (std::size_t b = 0; b < kNumBytes; ++b) source[b] = pattern(0, 0, b);
  cuda::CopyParams copy;
  copy.world = ranks.world(0);
  copy.rank = last;
  copy.symmetric = ranks.heap(0) + kRowOffset;
  copy.own = source;
  copy.num_bytes = kNumBytes;
  copy.later = true;
  ASSERT_EQ(cuda::share_copy(copy, 8), by_request ? 1U : 3U);
  if (by_request) {
    copy.word = ranks.word(0, kSignal);
    copy.value = 3;
    copy.op = SignalOp::kAdd;
  }
  cuda::launch_put(copy, ranks.stream(0));
  ASSERT_EQ(ranks.run(), "");
  EXPECT_TRUE(std::equal(source, source + kNumBytes, ranks.heap(last) + kRowOffset));
  if (by_request) {
    EXPECT_EQ(*ranks.word(last, kSignal), 3U);
    EXPECT_EQ(ranks.source(0).num_taken(), 1U);
  }
  // Copies that must be staged, or that end outside of symmetric memory, use many blocks.
  copy.later = false;
  EXPECT_EQ(cuda::share_copy(copy, 8), 3U);
  copy.later = true;
  copy.own = ranks.heap(0) + options.heap_bytes - kNumBytes + 1;
  EXPECT_EQ(cuda::share_copy(copy, 8), 3U);
}

TEST(OneSidedNodes, AHostsFetchThatFailsLeavesItsResultAlone) {
  constexpr std::uint64_t kSentinel = 0x5EED'5EED'5EED'5EED;
  OneSidedRanks ranks({.num_ranks = 2, .ranks_per_node = 1});
  cuda::WordParams word;
  word.world = ranks.world(0);
  word.word = ranks.word(0, kCounter);
  word.value = 1;
  // Fills with answers the places where later answers will arrive.
  ranks.launch(0, {1, 1, 0}, [&] {
    for (std::uint32_t i = 0; i < device::kNumReplies; ++i)
      device::fetch_add(word.world, 1, ranks.word(0, kCounter), 1);
  });
  ASSERT_EQ(ranks.run(), "");
  ASSERT_EQ(*ranks.word(1, kCounter), device::kNumReplies);
  ranks.stall(1, true);
  // Late calls and refused calls.
  for (const int rank : {1, 2}) {
    for (const cuda::WordCall call : {cuda::WordCall::kFetchAdd, cuda::WordCall::kCompareSwap}) {
      std::uint64_t fetched = kSentinel;
      word.call = call;
      word.rank = rank;
      word.fetched = &fetched;
      cuda::launch_word_call(word, ranks.stream(0));
      ASSERT_EQ(ranks.run(), "");
      EXPECT_EQ(fetched, kSentinel) << "rank " << rank;
    }
  }
  EXPECT_EQ(ranks.errors(0).code, static_cast<int>(Code::kTimeout));
}

/// Number of requests of one put_signal from rank 0 to the last rank, in another node.
template <Scope kScope>
std::uint64_t requests_of_put_signal(const OneSidedRanks::Options& options, unsigned num_threads, std::size_t num_bytes,
                                     bool nbi) {
  OneSidedRanks ranks(options);
  const int last = ranks.num_ranks() - 1;
  std::byte* const source = ranks.heap(0) + 2048;
  for (std::size_t b = 0; b < num_bytes; ++b) source[b] = pattern(0, 0, b);
  int num_errors = 0;
  bool complete = false;
  std::uint64_t num_requests = 0;
  ranks.launch(0, {1, num_threads, 0}, [&] {
    const World world = ranks.world(0);
    const auto put = nbi ? device::put_signal_nbi<kScope> : device::put_signal<kScope>;
    num_errors += put(world, last, world.heap + kRowOffset, source, num_bytes, ranks.word(0, kSignal), 7,
                      SignalOp::kAdd) != Code::kOk;
    if (threadIdx.x == 0) num_requests = world.state->ring.head;
    num_errors += device::quiet<kScope>(world) != Code::kOk;
    if (threadIdx.x != 0) return;
    complete = *ranks.word(last, kSignal) == 7 && std::equal(source, source + num_bytes, ranks.heap(last) + kRowOffset);
  });
  EXPECT_EQ(ranks.run(), "");
  EXPECT_EQ(num_errors, 0);
  EXPECT_TRUE(complete) << "after quiet, of " << num_bytes << " bytes";
  EXPECT_EQ(ranks.source(0).num_taken(), num_requests + 1) << "plus the quiet";
  return num_requests;
}

TEST(OneSidedNodes, APutAndItsSignalAreOneRequest) {
  const OneSidedRanks::Options options{.num_ranks = 4, .ranks_per_node = 2, .seed = 3};
  const std::uint64_t slot = options.slot_bytes;
  // A word, less than a word, and as much as a slot holds, by the members of each scope.
  for (const std::size_t num_bytes : {std::size_t{8}, std::size_t{3}, std::size_t{slot - 1}, std::size_t{slot}}) {
    EXPECT_EQ(requests_of_put_signal<Scope::kThread>(options, 1, num_bytes, false), 1U) << num_bytes;
    EXPECT_EQ(requests_of_put_signal<Scope::kWarp>(options, 32, num_bytes, false), 1U) << num_bytes;
    EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 96, num_bytes, false), 1U) << num_bytes;
  }
  // From symmetric memory without a copy: any size takes one request.
  EXPECT_EQ(requests_of_put_signal<Scope::kThread>(options, 1, 5 * slot + 3, true), 1U);
  EXPECT_EQ(requests_of_put_signal<Scope::kWarp>(options, 32, 5 * slot + 3, true), 1U);
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 96, 5 * slot + 3, true), 1U);
  // In chunks: the last one carries the signal if it follows the others. Warps of a block issue requests in any order.
  EXPECT_EQ(requests_of_put_signal<Scope::kThread>(options, 1, 5 * slot + 3, false), 6U);
  EXPECT_EQ(requests_of_put_signal<Scope::kWarp>(options, 32, 5 * slot, false), 5U);
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 32, 5 * slot, false), 5U);
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 24, 5 * slot, false), 5U) << "no whole warp";
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 96, 5 * slot, false), 6U);
}

}  // namespace
}  // namespace ferry::emulator
