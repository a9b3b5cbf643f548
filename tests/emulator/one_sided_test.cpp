/// One-sided calls of kernels, in a node and over a network that mixes up all it may.

#include "ferry/device/one_sided.cuh"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "cuda/one_sided/kernels.hpp"
#include "emulator/one_sided_ranks.hpp"

namespace ferry::emulator {
namespace {

using device::Code;
using device::Scope;
using device::World;

constexpr std::uint64_t kNumSeeds = 6;
constexpr int kSignal = 0;  // words of a heap
constexpr int kCounter = 1;
constexpr std::size_t kRowOffset = 256;

/// What rank `rank` sends in round `round`, byte `i`.
std::byte pattern(int rank, int round, std::size_t i) {
  return static_cast<std::byte>((static_cast<std::size_t>(rank) * 31 + static_cast<std::size_t>(round) * 7 + i) % 251);
}

struct Nodes {
  int num_ranks;
  int ranks_per_node;
};

class OneSidedKernels : public testing::TestWithParam<Nodes> {
 protected:
  static OneSidedRanks::Options options(std::uint64_t seed) {
    OneSidedRanks::Options options;
    options.num_ranks = GetParam().num_ranks;
    options.ranks_per_node = GetParam().ranks_per_node;
    options.seed = seed;
    return options;
  }
};

/// A row for the next rank in each round, which uses it before the next round.
template <Scope kScope>
void hand_on(const World& world, std::byte* row, const std::byte* mine, std::size_t num_bytes, std::uint64_t* signal,
             bool nbi, std::vector<Code>& codes, std::byte* got) {
  const int next = (world.rank + 1) % world.num_ranks;
  const Code sent = nbi ? device::put_signal_nbi<kScope>(world, next, row, mine, num_bytes, signal, 1, SignalOp::kAdd)
                        : device::put_signal<kScope>(world, next, row, mine, num_bytes, signal, 1, SignalOp::kAdd);
  const Code came = device::wait_until<kScope>(world, signal, Comparison::kEqual, 1);
  if (!device::is_leader<kScope>()) return;
  codes.push_back(sent);
  codes.push_back(came);
  std::copy_n(row, num_bytes, got);
}

template <Scope kScope>
void check_hand_on(const OneSidedRanks::Options& options, unsigned num_threads) {
  // Sizes around those of units and of staging slots, and offsets that are not aligned.
  // The last: a chunk for each warp of a block, whichever is first.
  const std::vector<std::pair<std::size_t, std::size_t>> shapes = {{8, 0},   {1, 3},   {64, 0}, {65, 1},
                                                                   {400, 8}, {333, 4}, {192, 0}};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto [num_bytes, shift] = shapes[i];
    OneSidedRanks ranks(options);
    std::vector<std::vector<std::byte>> mine(4, std::vector<std::byte>(num_bytes + 16));
    std::vector<std::vector<std::byte>> got(4, std::vector<std::byte>(num_bytes));
    std::vector<Code> codes;
    const bool nbi = i % 2 == 1;
    for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
      std::byte* source = nbi ? ranks.heap(rank) + 2048 + shift : mine[static_cast<std::size_t>(rank)].data() + shift;
      for (std::size_t b = 0; b < num_bytes; ++b) source[b] = pattern(rank, 0, b);
      ranks.launch(rank, {1, num_threads, 0}, [&, rank, source, num_bytes = num_bytes, shift = shift] {
        const World world = ranks.world(rank);
        hand_on<kScope>(world, world.heap + kRowOffset + shift, source, num_bytes, ranks.word(rank, kSignal), nbi,
                        codes, got[static_cast<std::size_t>(rank)].data());
      });
    }
    ASSERT_EQ(ranks.run(), "");
    EXPECT_EQ(codes, std::vector<Code>(static_cast<std::size_t>(2 * ranks.num_ranks()), Code::kOk));
    for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
      const int from = (rank + ranks.num_ranks() - 1) % ranks.num_ranks();
      for (std::size_t b = 0; b < num_bytes; ++b) {
        ASSERT_EQ(got[static_cast<std::size_t>(rank)][b], pattern(from, 0, b)) << num_bytes << " bytes, byte " << b;
      }
    }
  }
}

TEST_P(OneSidedKernels, WhoSeesTheSignalSeesTheBytes) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    check_hand_on<Scope::kThread>(options(seed), 1);
    check_hand_on<Scope::kWarp>(options(seed), 32);
    check_hand_on<Scope::kBlock>(options(seed), 96);
    if (HasFatalFailure()) return;
  }
}

/// Many writers of one ring, each with a row and a word of its own at the last rank, which answers every row.
TEST_P(OneSidedKernels, RowsOfManyWritersAreThereWithTheirSignalsThroughARingThatIsAlwaysFull) {
  constexpr unsigned kNumWriters = 24;
  constexpr int kNumRounds = 5;
  constexpr std::size_t kRowBytes = 40;
  constexpr int kWords = 16;  // signals, then answers
  constexpr std::size_t kRows = 4096;
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    OneSidedRanks::Options options = this->options(seed);
    options.num_slots = 2;
    OneSidedRanks ranks(options);
    const int last = ranks.num_ranks() - 1;
    int num_errors = 0;
    int num_torn = 0;
    std::vector<std::vector<std::byte>> rows(kNumWriters, std::vector<std::byte>(kRowBytes));
    // Sizes of every way that bytes travel: in the request, in staging memory, in chunks.
    const auto bytes_of = [](unsigned writer, int round) {
      constexpr std::size_t kSizes[] = {8, kRowBytes, 5};
      return kSizes[(writer + static_cast<unsigned>(round)) % 3];
    };
    ranks.launch(0, {1, kNumWriters, 0}, [&] {
      const World world = ranks.world(0);
      const unsigned writer = threadIdx.x;
      for (int round = 1; round <= kNumRounds; ++round) {
        for (std::size_t b = 0; b < kRowBytes; ++b) rows[writer][b] = pattern(static_cast<int>(writer), round, b);
        const bool adds = (writer + static_cast<unsigned>(round)) % 2 == 0;
        num_errors += device::put_signal(world, last, world.heap + kRows + writer * 64, rows[writer].data(),
                                         bytes_of(writer, round), ranks.word(0, kWords + static_cast<int>(writer)),
                                         adds ? 1 : static_cast<std::uint64_t>(round),
                                         adds ? SignalOp::kAdd : SignalOp::kSet) != Code::kOk;
        std::fill(rows[writer].begin(), rows[writer].end(), std::byte{0xEE});  // it may be reused
        const std::uint64_t* const answer = ranks.word(0, kWords + static_cast<int>(kNumWriters + writer));
        num_errors +=
            device::wait_until(world, answer, Comparison::kEqual, static_cast<std::uint64_t>(round)) != Code::kOk;
      }
    });
    ranks.launch(last, {1, kNumWriters, 0}, [&] {
      const World world = ranks.world(last);
      const unsigned writer = threadIdx.x;
      for (int round = 1; round <= kNumRounds; ++round) {
        const std::uint64_t* const signal = ranks.word(last, kWords + static_cast<int>(writer));
        num_errors +=
            device::wait_until(world, signal, Comparison::kEqual, static_cast<std::uint64_t>(round)) != Code::kOk;
        const std::byte* const row = world.heap + kRows + writer * 64;
        for (std::size_t b = 0; b < bytes_of(writer, round); ++b) {
          num_torn += row[b] != pattern(static_cast<int>(writer), round, b);
        }
        std::uint64_t* const answer = ranks.word(last, kWords + static_cast<int>(kNumWriters + writer));
        num_errors += device::signal(world, 0, answer, 1, SignalOp::kAdd) != Code::kOk;
      }
    });
    ASSERT_EQ(ranks.run(), "") << "seed " << seed;
    EXPECT_EQ(num_errors, 0) << "seed " << seed;
    EXPECT_EQ(num_torn, 0) << "seed " << seed;
  }
}

TEST_P(OneSidedKernels, EveryBitOfAWordAndItsSignalArrives) {
  constexpr std::uint64_t kWord = 0xFEDC'BA98'7654'3210;
  constexpr std::uint64_t kValue = 0x8000'0000'0000'0001;
  for (const SignalOp op : {SignalOp::kSet, SignalOp::kAdd}) {
    OneSidedRanks ranks(options(2));
    const int last = ranks.num_ranks() - 1;
    *ranks.word(last, kSignal) = 1;
    ranks.launch(0, {1, 1, 0}, [&] {
      const World world = ranks.world(0);
      const std::uint64_t word = kWord;
      device::put_signal(world, last, ranks.word(0, 4), &word, sizeof(word), ranks.word(0, kSignal), kValue, op);
    });
    ASSERT_EQ(ranks.run(), "");
    EXPECT_EQ(*ranks.word(last, 4), kWord);
    EXPECT_EQ(*ranks.word(last, kSignal), op == SignalOp::kSet ? kValue : kValue + 1);
  }
}

TEST_P(OneSidedKernels, WhatAnyThreadDidBeforeIsBeforeTheBlocksCall) {
  constexpr unsigned kNumThreads = 64;
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    OneSidedRanks ranks(options(seed));
    const int last = ranks.num_ranks() - 1;
    std::vector<std::byte> row(kNumThreads);
    std::vector<std::byte> landing(kNumThreads);
    std::uint64_t value = 0;
    Code waited = Code::kOk;
    ranks.word(0, kCounter)[0] = 1;
    ranks.launch(0, {1, kNumThreads, 0}, [&] {
      const World world = ranks.world(0);
      const unsigned thread = threadIdx.x;
      row[thread] = pattern(0, 0, thread);
      device::put<Scope::kBlock>(world, last, world.heap + kRowOffset, row.data(), row.size());
      if (thread == kNumThreads - 1) value = 5;
      device::put<Scope::kBlock>(world, last, ranks.word(0, 4), &value, sizeof(value));
      device::quiet<Scope::kBlock>(world);
      landing[thread] = std::byte{0xFF};
      device::get<Scope::kBlock>(world, last, landing.data(), world.heap + kRowOffset, landing.size());
      if (thread == kNumThreads - 1) *ranks.word(0, kCounter) = 0;
      const Code code = device::wait_until<Scope::kBlock>(world, ranks.word(0, kCounter), Comparison::kEqual, 1, 1000);
      if (thread == 0) waited = code;
    });
    ASSERT_EQ(ranks.run(), "");
    EXPECT_TRUE(std::equal(row.begin(), row.end(), ranks.heap(last) + kRowOffset));
    EXPECT_EQ(landing, row);
    EXPECT_EQ(*ranks.word(last, 4), 5U);
    EXPECT_EQ(waited, Code::kTimeout) << "the word was 0 when the wait began";
  }
}

TEST_P(OneSidedKernels, AfterABarrierEverythingIsThereAndGetsFindIt) {
  constexpr std::size_t kNumBytes = 150;
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    OneSidedRanks ranks(options(seed));
    const auto num_ranks = static_cast<std::size_t>(ranks.num_ranks());
    std::vector<int> num_wrong(num_ranks, 0);
    std::vector<std::vector<std::byte>> landing(num_ranks, std::vector<std::byte>(kNumBytes));
    for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
      ranks.launch(rank, {1, 64, 0}, [&, rank] {
        const World world = ranks.world(rank);
        const auto me = static_cast<std::size_t>(rank);
        std::byte* const row = world.heap + kRowOffset;
        std::byte* const symmetric = world.heap + kRowOffset + 1024;
        int wrong = 0;
        for (int round = 0; round < 3; ++round) {
          const unsigned thread = threadIdx.x;
          for (std::size_t b = thread; b < kNumBytes; b += 64) row[b] = pattern(rank, round, b);
          if (device::barrier<Scope::kBlock>(world, ranks.team(rank)) != Code::kOk) ++wrong;
          const int peer = (rank + 1 + round) % world.num_ranks;
          // Into memory of its own, and into symmetric memory, at once and later.
          wrong += device::get<Scope::kBlock>(world, peer, landing[me].data(), row, kNumBytes) != Code::kOk;
          wrong += device::get_nbi<Scope::kBlock>(world, peer, symmetric, row, kNumBytes) != Code::kOk;
          wrong += device::get<Scope::kBlock>(world, peer, symmetric + 512, row, kNumBytes) != Code::kOk;
          wrong += device::quiet<Scope::kBlock>(world) != Code::kOk;
          for (std::size_t b = thread; b < kNumBytes; b += 64) {
            const std::byte expected = pattern(peer, round, b);
            wrong += landing[me][b] != expected || symmetric[b] != expected || symmetric[512 + b] != expected;
          }
          if (device::barrier<Scope::kBlock>(world, ranks.team(rank)) != Code::kOk) ++wrong;
        }
        num_wrong[me] += wrong;
      });
    }
    ASSERT_EQ(ranks.run(), "") << "seed " << seed;
    EXPECT_EQ(num_wrong, std::vector<int>(num_ranks, 0)) << "seed " << seed;
  }
}

TEST_P(OneSidedKernels, ManyThreadsCountAndLockThroughARingThatIsAlwaysFull) {
  constexpr int kNumRounds = 3;
  constexpr unsigned kNumThreads = 48;
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    OneSidedRanks::Options options = this->options(seed);
    options.num_slots = 2;
    OneSidedRanks ranks(options);
    int num_errors = 0;
    std::vector<std::uint64_t> before;
    int num_swapped = 0;
    for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
      ranks.launch(rank, {2, kNumThreads, 0}, [&, rank] {
        const World world = ranks.world(rank);
        for (int round = 0; round < kNumRounds; ++round) {
          const device::Fetched fetched = device::fetch_add(world, 0, ranks.word(rank, kCounter), 1);
          num_errors += fetched.code != Code::kOk;
          before.push_back(fetched.value);
          num_errors += device::signal(world, world.num_ranks - 1, ranks.word(rank, 2), 1, SignalOp::kAdd) != Code::kOk;
        }
        // One of all threads finds 0.
        const device::Fetched swapped = device::compare_swap(world, 1, ranks.word(rank, 3), 0, 7);
        num_errors += swapped.code != Code::kOk || (swapped.value != 0 && swapped.value != 7);
        num_swapped += swapped.value == 0;
        num_errors += device::quiet(world) != Code::kOk;
      });
    }
    ASSERT_EQ(ranks.run(), "") << "seed " << seed;
    EXPECT_EQ(num_errors, 0);
    EXPECT_EQ(num_swapped, 1);
    std::sort(before.begin(), before.end());
    std::vector<std::uint64_t> expected(static_cast<std::size_t>(ranks.num_ranks()) * 2 * kNumThreads * kNumRounds);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(before, expected);
    EXPECT_EQ(*ranks.word(0, kCounter), expected.size());
    EXPECT_EQ(*ranks.word(ranks.num_ranks() - 1, 2), expected.size()) << "complete after quiet";
  }
}

TEST_P(OneSidedKernels, AFenceOrdersAndWithoutItNothingDoes) {
  bool overtaken = false;
  for (std::uint64_t seed = 1; seed <= 4 * kNumSeeds; ++seed) {
    for (const bool fenced : {true, false}) {
      OneSidedRanks ranks(options(seed));
      const int last = ranks.num_ranks() - 1;
      Code waited = Code::kOk;
      std::uint64_t first = 0;
      ranks.launch(0, {1, 1, 0}, [&] {
        const World world = ranks.world(0);
        const std::uint64_t one = 1;
        device::put(world, last, ranks.word(0, 4), &one, sizeof(one));
        if (fenced) device::fence(world, last);
        device::put(world, last, ranks.word(0, 5), &one, sizeof(one));
      });
      ranks.launch(last, {1, 1, 0}, [&] {
        waited = device::wait_until(ranks.world(last), ranks.word(last, 5), Comparison::kNotEqual, 0);
        first = *ranks.word(last, 4);
      });
      ASSERT_EQ(ranks.run(), "");
      EXPECT_EQ(waited, Code::kOk);
      if (fenced) {
        EXPECT_EQ(first, 1U) << "seed " << seed;
      }
      overtaken = overtaken || first == 0;
    }
  }
  // Or else this test shows nothing.
  EXPECT_EQ(overtaken, GetParam().num_ranks > GetParam().ranks_per_node);
}

/// A quiet of one thread is under way, for what another has put and now orders by a fence.
TEST_P(OneSidedKernels, AFenceOrdersWhatAnothersQuietHasNotCompletedYet) {
  for (std::uint64_t seed = 1; seed <= 4 * kNumSeeds; ++seed) {
    OneSidedRanks ranks(options(seed));
    const int last = ranks.num_ranks() - 1;
    Code waited = Code::kOk;
    std::uint64_t first = 0;
    ranks.launch(0, {1, 2, 0}, [&] {
      const World world = ranks.world(0);
      const std::uint64_t one = 1;
      if (threadIdx.x == 0) device::put(world, last, ranks.word(0, 4), &one, sizeof(one));
      __syncthreads();
      if (threadIdx.x == 1) {
        device::quiet(world);
        return;
      }
      device::fence(world, last);
      device::put(world, last, ranks.word(0, 5), &one, sizeof(one));
    });
    ranks.launch(last, {1, 1, 0}, [&] {
      waited = device::wait_until(ranks.world(last), ranks.word(last, 5), Comparison::kNotEqual, 0);
      first = *ranks.word(last, 4);
    });
    ASSERT_EQ(ranks.run(), "");
    EXPECT_EQ(waited, Code::kOk);
    EXPECT_EQ(first, 1U) << "seed " << seed;
  }
}

TEST_P(OneSidedKernels, BadArgumentsAreRefusedAndRecorded) {
  OneSidedRanks ranks(options(1));
  const std::uint64_t end = 8192;
  std::vector<Code> codes;
  const std::vector<std::byte> before(ranks.heap(1), ranks.heap(1) + end);
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    std::uint64_t value = 5;
    auto* const odd = reinterpret_cast<std::uint64_t*>(world.heap + 4);
    auto* const past = reinterpret_cast<std::uint64_t*>(world.heap + end);
    codes.push_back(device::put(world, world.num_ranks, world.heap, &value, 8));
    codes.push_back(device::put(world, -1, world.heap, &value, 8));
    codes.push_back(device::put(world, 1, world.heap + end - 4, &value, 8));
    codes.push_back(device::put(world, 1, world.heap - 8, &value, 8));
    codes.push_back(device::put(world, 1, world.heap, &value, ~std::uint64_t{0}));
    codes.push_back(device::get(world, 1, &value, past, 1));
    codes.push_back(device::signal(world, 1, odd, 1, SignalOp::kSet));
    codes.push_back(device::put_signal(world, 1, world.heap, &value, 8, past, 1, SignalOp::kAdd));
    codes.push_back(device::put_signal(world, 1, past, &value, 8, ranks.word(0, kSignal), 1, SignalOp::kAdd));
    codes.push_back(device::fetch_add(world, 1, past, 1).code);
    codes.push_back(device::compare_swap(world, 1, odd, 0, 1).code);
    codes.push_back(device::wait_until(world, odd, Comparison::kEqual, 0));
    codes.push_back(device::fence(world, -1));
    EXPECT_EQ(device::peer_pointer(world, 1, past), nullptr);
    EXPECT_EQ(device::peer_pointer(world, world.num_ranks, &world.heap[0]), nullptr);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, std::vector<Code>(codes.size(), Code::kInvalidArgument));
  EXPECT_EQ(std::vector<std::byte>(ranks.heap(1), ranks.heap(1) + end), before);
  EXPECT_EQ(ranks.errors(0).state, 1U);
  EXPECT_EQ(ranks.errors(0).code, static_cast<int>(Code::kInvalidArgument));
  EXPECT_EQ(ranks.errors(0).call, static_cast<int>(device::Call::kPut));
  EXPECT_EQ(ranks.errors(0).rank, ranks.num_ranks()) << "the first error stays until the host has read it";
}

TEST_P(OneSidedKernels, AWaitThatNobodyAnswersEndsByItsDeadline) {
  OneSidedRanks ranks(options(1));
  std::vector<Code> codes;
  ranks.launch(0, {1, 64, 0}, [&] {
    const World world = ranks.world(0);
    const Code code = device::wait_until<Scope::kBlock>(world, ranks.word(0, kSignal), Comparison::kGreater, 3, 1000);
    codes.push_back(code);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, std::vector<Code>(64, Code::kTimeout));
  const device::ErrorRecord& error = ranks.errors(0);
  EXPECT_EQ(error.state, 1U);
  EXPECT_EQ(error.code, static_cast<int>(Code::kTimeout));
  EXPECT_EQ(error.call, static_cast<int>(device::Call::kWaitUntil));
  EXPECT_EQ(error.comparison, static_cast<int>(Comparison::kGreater));
  EXPECT_EQ(error.expected, 3U);
  EXPECT_EQ(error.timeout_ns, 1000U);
}

TEST_P(OneSidedKernels, TheLongestDeadlineIsNotOver) {
  OneSidedRanks ranks(options(1));
  Code code = Code::kTimeout;
  ranks.launch(0, {1, 1, 0}, [&] {
    code = device::wait_until(ranks.world(0), ranks.word(0, kSignal), Comparison::kEqual, 1, ~std::uint64_t{0});
  });
  ranks.launch(1, {1, 1, 0}, [&] {
    const World world = ranks.world(1);
    // Waits for a while, much longer than the first looks of the other.
    device::wait_until(world, ranks.word(1, kSignal), Comparison::kEqual, 1, 1'000'000);
    device::signal(world, 0, ranks.word(1, kSignal), 1, SignalOp::kSet);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(code, Code::kOk);
}

TEST_P(OneSidedKernels, ARankThatNeverComesEndsTheBarrierOfTheOthers) {
  OneSidedRanks ranks(options(1));
  Code code = Code::kOk;
  ranks.launch(0, {1, 32, 0}, [&] { code = device::barrier<Scope::kWarp>(ranks.world(0), ranks.team(0)); });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(code, Code::kTimeout);
  EXPECT_EQ(ranks.errors(0).call, static_cast<int>(device::Call::kBarrier));
}

TEST_P(OneSidedKernels, CallsOfTheHostAreKernels) {
  OneSidedRanks::Options options = this->options(1);
  options.heap_bytes = std::uint64_t{256} << 10;
  constexpr std::uint64_t kNumBytes = 70'000;  // more than one block's
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
    cuda::launch_get(copy, stream);  // this rank's own bytes, back from the next
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

TEST_P(OneSidedKernels, AHostsPutAndSignalFromSymmetricMemoryAreOneRequest) {
  OneSidedRanks::Options options = this->options(1);
  options.heap_bytes = std::uint64_t{512} << 10;
  constexpr std::uint64_t kNumBytes = 170'000;  // more than one block's
  constexpr std::uint64_t kSourceOffset = std::uint64_t{256} << 10;
  OneSidedRanks ranks(options);
  const int last = ranks.num_ranks() - 1;
  const bool by_request = GetParam().num_ranks > GetParam().ranks_per_node;
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
  // What must be staged, and what ends outside of symmetric memory, is for many blocks.
  copy.later = false;
  EXPECT_EQ(cuda::share_copy(copy, 8), 3U);
  copy.later = true;
  copy.own = ranks.heap(0) + options.heap_bytes - kNumBytes + 1;
  EXPECT_EQ(cuda::share_copy(copy, 8), 3U);
}

INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedKernels, testing::Values(Nodes{2, 2}, Nodes{2, 1}, Nodes{4, 2}),
                         [](const testing::TestParamInfo<Nodes>& shape) {
                           return std::to_string(shape.param.num_ranks) + "RanksOf" +
                                  std::to_string(shape.param.ranks_per_node);
                         });

TEST(OneSidedNode, RanksWhoseAddressesAreNotInTheWorldAreReached) {
  constexpr int kNumRanks = device::kNumNearHeaps + 2;
  OneSidedRanks ranks({.num_ranks = kNumRanks, .ranks_per_node = kNumRanks});
  int num_errors = 0;
  ranks.launch(1, {1, 1, 0}, [&] {
    const World world = ranks.world(1);
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const auto value = static_cast<std::uint64_t>(rank) + 1;
      num_errors += device::put(world, rank, ranks.word(1, 4), &value, sizeof(value)) != Code::kOk;
      num_errors += device::fetch_add(world, rank, ranks.word(1, kCounter), value).code != Code::kOk;
    }
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(num_errors, 0);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    EXPECT_EQ(*ranks.word(rank, 4), static_cast<std::uint64_t>(rank) + 1);
    EXPECT_EQ(*ranks.word(rank, kCounter), static_cast<std::uint64_t>(rank) + 1);
  }
}

/// Requests that one put_signal takes which rank 0 makes to the last rank, of another node.
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
  EXPECT_EQ(ranks.source(0).num_taken(), num_requests + 1) << "and the quiet";
  return num_requests;
}

TEST(OneSidedNodes, APutAndItsSignalAreOneRequest) {
  const OneSidedRanks::Options options{.num_ranks = 4, .ranks_per_node = 2, .seed = 3};
  const std::uint64_t slot = options.slot_bytes;
  // A word, less than one, and all that a slot has room for; by the members of each scope.
  for (const std::size_t num_bytes : {std::size_t{8}, std::size_t{3}, std::size_t{slot - 1}, std::size_t{slot}}) {
    EXPECT_EQ(requests_of_put_signal<Scope::kThread>(options, 1, num_bytes, false), 1U) << num_bytes;
    EXPECT_EQ(requests_of_put_signal<Scope::kWarp>(options, 32, num_bytes, false), 1U) << num_bytes;
    EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 96, num_bytes, false), 1U) << num_bytes;
  }
  // From symmetric memory without a copy: of any size.
  EXPECT_EQ(requests_of_put_signal<Scope::kThread>(options, 1, 5 * slot + 3, true), 1U);
  EXPECT_EQ(requests_of_put_signal<Scope::kWarp>(options, 32, 5 * slot + 3, true), 1U);
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 96, 5 * slot + 3, true), 1U);
  // In chunks: the last has the signal, if it is behind the others. Warps of a block ask in no order.
  EXPECT_EQ(requests_of_put_signal<Scope::kThread>(options, 1, 5 * slot + 3, false), 6U);
  EXPECT_EQ(requests_of_put_signal<Scope::kWarp>(options, 32, 5 * slot, false), 5U);
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 32, 5 * slot, false), 5U);
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 24, 5 * slot, false), 5U) << "no whole warp";
  EXPECT_EQ(requests_of_put_signal<Scope::kBlock>(options, 96, 5 * slot, false), 6U);
}

TEST(OneSidedNodes, ALostPeerEndsWhatWaitsForIt) {
  for (const bool told : {true, false}) {
    OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1});
    ranks.lose(2, told);
    std::vector<Code> codes;
    ranks.launch(0, {1, 1, 0}, [&] {
      const World world = ranks.world(0);
      const std::uint64_t one = 1;
      device::put(world, 2, ranks.word(0, 4), &one, sizeof(one));
      codes.push_back(device::quiet(world));
      codes.push_back(device::fetch_add(world, 2, ranks.word(0, 4), 1).code);
      device::quiet(world);
      // The others are still there.
      device::put(world, 1, ranks.word(0, 4), &one, sizeof(one));
      codes.push_back(device::quiet(world));
    });
    ASSERT_EQ(ranks.run(), "");
    EXPECT_EQ(codes, (std::vector<Code>{Code::kPeerLost, Code::kPeerLost, Code::kOk}));
    EXPECT_EQ(*ranks.word(1, 4), 1U);
    EXPECT_EQ(ranks.errors(0).code, static_cast<int>(Code::kPeerLost));
  }
}

TEST(OneSidedNodes, AWaitEndsWhenTheHostFindsARankLost) {
  OneSidedRanks ranks({.num_ranks = 2, .ranks_per_node = 1});
  ranks.errors(0).stop = 1;
  Code code = Code::kOk;
  ranks.launch(0, {1, 1, 0},
               [&] { code = device::wait_until(ranks.world(0), ranks.word(0, kSignal), Comparison::kEqual, 1); });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(code, Code::kPeerLost);
}

TEST(OneSidedNodes, ARequestThatIsCutShortEndsWithTheReadersError) {
  OneSidedRanks ranks({.num_ranks = 2, .ranks_per_node = 1});
  std::vector<Code> codes;
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    // What device code must never do.
    device::Request bad;
    bad.op = device::RequestOp::kPut;
    bad.peer = 1;
    bad.num_bytes = 1 << 20;
    device::post(world, bad);
    codes.push_back(device::quiet(world));
    codes.push_back(device::fetch_add(world, 1, ranks.word(0, kCounter), 1).code);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, (std::vector<Code>{Code::kTimeout, Code::kTimeout}));
  EXPECT_EQ(ranks.source(0).status().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry::emulator
