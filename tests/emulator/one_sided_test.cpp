/// One-sided calls of kernels, in a node and over a network that reorders everything it may.

#include "ferry/device/one_sided.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "emulator/one_sided_case.hpp"

namespace ferry::emulator {
namespace {

using device::Code;
using device::Scope;
using device::World;

constexpr std::uint64_t kNumSeeds = 6;

class OneSidedKernels : public OnNodes {};
INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedKernels, all_shapes(), shape_name);

/// Each rank sends a row to the next rank in each round; the receiver uses it before the next round.
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
  // Sizes around those of units and of staging slots, with unaligned offsets. The last shape has one chunk per warp of
  // a block, in any order.
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

/// Many writers of one ring, each with its own row and word at the last rank, which answers every row.
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
    // One size for each path of the bytes: in the request, in staging memory, in chunks.
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
        std::fill(rows[writer].begin(), rows[writer].end(), std::byte{0xEE});  // the source may be reused
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
          // Into the kernel's own memory, and into symmetric memory, blocking and nonblocking.
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

/// Gets of a few bytes, from and to any address; answers carry the bytes of gets of at most eight.
template <Scope kScope>
void check_short_gets(const OneSidedRanks::Options& options, unsigned num_threads) {
  constexpr std::size_t kMostBytes = 17;
  constexpr std::byte kUntouched{0xEE};
  OneSidedRanks ranks(options);
  const int last = ranks.num_ranks() - 1;
  for (std::size_t b = 0; b < 2 * kMostBytes; ++b) ranks.heap(last)[kRowOffset + b] = pattern(last, 0, b + 1);
  int num_wrong = 0;
  alignas(8) std::array<std::byte, 3 * kMostBytes> landing{};
  ranks.launch(0, {1, num_threads, 0}, [&] {
    const World world = ranks.world(0);
    for (std::size_t num_bytes = 0; num_bytes <= kMostBytes; ++num_bytes) {
      for (const std::size_t from : {0U, 1U, 4U, 8U}) {
        for (const std::size_t to : {8U, 11U, 12U}) {
          if (device::is_leader<kScope>()) landing.fill(kUntouched);
          device::Members<kScope>::meet();
          std::byte* const dest = landing.data() + to;
          num_wrong += device::get<kScope>(world, last, dest, world.heap + kRowOffset + from, num_bytes) != Code::kOk;
          for (std::size_t b = 0; b < landing.size(); ++b) {
            const bool is_got = b >= to && b < to + num_bytes;
            num_wrong += landing[b] != (is_got ? pattern(last, 0, from + b - to + 1) : kUntouched);
          }
          device::Members<kScope>::meet();
        }
      }
    }
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(OneSidedKernels, ShortGetsBringTheirBytesAndNoOthers) {
  check_short_gets<Scope::kThread>(options(1), 1);
  check_short_gets<Scope::kWarp>(options(2), 32);
  check_short_gets<Scope::kBlock>(options(3), 64);
}

/// Ranks 0 and 1 each put a word at the last rank, call quiet, and get the other's word.
template <Scope kScope>
void check_store_buffering(const OneSidedRanks::Options& options, unsigned num_threads) {
  constexpr int kNumRounds = 8;
  OneSidedRanks ranks(options);
  const int home = ranks.num_ranks() - 1;
  std::vector<std::vector<std::uint64_t>> seen(2, std::vector<std::uint64_t>(kNumRounds));
  int num_errors = 0;
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    ranks.launch(rank, {1, num_threads, 0}, [&, rank] {
      const World world = ranks.world(rank);
      for (int round = 0; round < kNumRounds; ++round) {
        num_errors += device::barrier<kScope>(world, ranks.team(rank)) != Code::kOk;
        if (rank >= 2) continue;
        const std::uint64_t one = 1;
        std::uint64_t* const into = &seen[static_cast<std::size_t>(rank)][static_cast<std::size_t>(round)];
        std::uint64_t* const mine = ranks.word(rank, 2 + 2 * round + rank);
        num_errors += device::put<kScope>(world, home, mine, &one, sizeof(one)) != Code::kOk;
        num_errors += device::quiet<kScope>(world) != Code::kOk;
        std::uint64_t* const theirs = ranks.word(rank, 2 + 2 * round + 1 - rank);
        num_errors += device::get<kScope>(world, home, into, theirs, sizeof(one)) != Code::kOk;
      }
    });
  }
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(num_errors, 0);
  for (std::size_t round = 0; round < kNumRounds; ++round) {
    EXPECT_GE(seen[0][round] + seen[1][round], 1U) << "neither saw the other's in round " << round;
  }
}

TEST_P(OneSidedKernels, QuietForbidsStoreBuffering) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    check_store_buffering<Scope::kThread>(options(seed), 1);
    check_store_buffering<Scope::kWarp>(options(seed), 32);
    check_store_buffering<Scope::kBlock>(options(seed), 64);
    if (HasFailure()) return;
  }
}

/// Value of word 4 of the last rank once its word 5 has changed. `send`, in threads of rank 0, puts to both.
template <typename Send>
std::uint64_t first_word_behind_second(OneSidedRanks& ranks, unsigned num_threads, Send send) {
  const int last = ranks.num_ranks() - 1;
  Code waited = Code::kTimeout;
  std::uint64_t first = 0;
  ranks.launch(0, {1, num_threads, 0}, [&] { send(ranks.world(0), last); });
  ranks.launch(last, {1, 1, 0}, [&] {
    waited = device::wait_until(ranks.world(last), ranks.word(last, 5), Comparison::kNotEqual, 0);
    first = *ranks.word(last, 4);
  });
  EXPECT_EQ(ranks.run(), "");
  EXPECT_EQ(waited, Code::kOk);
  return first;
}

TEST_P(OneSidedKernels, AFenceOrdersAndWithoutItNothingDoes) {
  const std::uint64_t one = 1;
  bool overtaken = false;
  for (std::uint64_t seed = 1; seed <= 4 * kNumSeeds; ++seed) {
    for (const bool fenced : {true, false}) {
      OneSidedRanks ranks(options(seed));
      const std::uint64_t first = first_word_behind_second(ranks, 1, [&](const World& world, int last) {
        device::put(world, last, ranks.word(0, 4), &one, sizeof(one));
        if (fenced) device::fence(world, last);
        device::put(world, last, ranks.word(0, 5), &one, sizeof(one));
      });
      if (fenced) {
        EXPECT_EQ(first, 1U) << "seed " << seed;
      }
      overtaken = overtaken || first == 0;
    }
  }
  // Otherwise this test would show nothing.
  EXPECT_EQ(overtaken, over_network());
}

/// A quiet of one thread is in progress for data that another thread has put and now orders by a fence.
TEST_P(OneSidedKernels, AFenceOrdersWhatAnothersQuietHasNotCompletedYet) {
  const std::uint64_t one = 1;
  for (std::uint64_t seed = 1; seed <= 4 * kNumSeeds; ++seed) {
    OneSidedRanks ranks(options(seed));
    const std::uint64_t first = first_word_behind_second(ranks, 2, [&](const World& world, int last) {
      if (threadIdx.x == 0) device::put(world, last, ranks.word(0, 4), &one, sizeof(one));
      __syncthreads();
      if (threadIdx.x == 1) {
        device::quiet(world);
        return;
      }
      device::fence(world, last);
      device::put(world, last, ranks.word(0, 5), &one, sizeof(one));
    });
    EXPECT_EQ(first, 1U) << "seed " << seed;
  }
}

/// Nodes with more ranks than a World has room for; the second node begins in the middle of the World's ranks.
TEST(OneSidedNode, RanksThatAreNotNearAreReached) {
  constexpr int kPerNode = device::kNumNearRanks + 2;
  for (const int num_nodes : {1, 2}) {
    OneSidedRanks ranks({.num_ranks = num_nodes * kPerNode, .ranks_per_node = kPerNode});
    const int first = (num_nodes - 1) * kPerNode;
    const int own = first + 1;
    int num_errors = 0;
    std::vector<std::uint64_t> got(kPerNode);
    ranks.launch(own, {1, 1, 0}, [&] {
      const World world = ranks.world(own);
      for (int i = 0; i < kPerNode; ++i) {
        const int rank = first + i;
        const auto value = static_cast<std::uint64_t>(i) + 1;
        num_errors += device::put(world, rank, ranks.word(own, 4), &value, sizeof(value)) != Code::kOk;
        num_errors += device::fetch_add(world, rank, ranks.word(own, kCounter), value).code != Code::kOk;
        num_errors += device::put_signal(world, rank, ranks.word(own, 5), &value, sizeof(value),
                                         ranks.word(own, kSignal), value, SignalOp::kSet) != Code::kOk;
        num_errors +=
            device::get(world, rank, &got[static_cast<std::size_t>(i)], ranks.word(own, 5), sizeof(value)) != Code::kOk;
        num_errors += device::peer_pointer(world, rank, ranks.word(own, 4)) != ranks.word(rank, 4);
      }
    });
    ASSERT_EQ(ranks.run(), "");
    EXPECT_EQ(num_errors, 0);
    for (int i = 0; i < kPerNode; ++i) {
      const auto value = static_cast<std::uint64_t>(i) + 1;
      EXPECT_EQ(*ranks.word(first + i, 4), value);
      EXPECT_EQ(*ranks.word(first + i, kCounter), value);
      EXPECT_EQ(*ranks.word(first + i, kSignal), value);
      EXPECT_EQ(got[static_cast<std::size_t>(i)], value);
    }
  }
}

}  // namespace
}  // namespace ferry::emulator
