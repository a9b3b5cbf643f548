/// Every atomic of kernels on words of 4 and 8 bytes, and quiet of one rank, in a node and over a network.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/one_sided/kernels.hpp"
#include "emulator/one_sided_case.hpp"
#include "ferry/device/one_sided.cuh"

namespace ferry::emulator {
namespace {

using cuda::WordCall;
using device::Call;
using device::Code;
using device::Fetched;
using device::Scope;
using device::World;

constexpr std::uint64_t kNumSeeds = 4;
constexpr int kFree = 8;  // the first of some words of a heap that no call of the network's uses

class OneSidedWords : public OnNodes {};
INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedWords, all_shapes(), shape_name);

/// Word `idx` of that size from kFree on.
template <typename Word>
Word* word_at(OneSidedRanks& ranks, int rank, int idx) {
  return reinterpret_cast<Word*>(ranks.word(rank, kFree)) + idx;
}

/// One atomic of each kind after the other, and the word after each.
template <typename Word>
struct Step {
  WordCall call;
  Word value;
  Word expected;  ///< of compare_swap
  Word after;
};

template <typename Word>
std::vector<Step<Word>> all_steps() {
  constexpr auto kFirst = static_cast<Word>(0xF0F1'F2F3'F4F5'F6F7);
  constexpr auto kMask = static_cast<Word>(0x8F00'FF00'8FF0'0F0F);
  constexpr auto kMany = static_cast<Word>(~kFirst + 3);
  return {{WordCall::kSwap, kFirst, 0, kFirst},
          {WordCall::kFetchAdd, kMany, 0, 2},
          {WordCall::kFetchOr, kFirst, 0, kFirst | 2},
          {WordCall::kFetchAnd, kMask, 0, (kFirst | 2) & kMask},
          {WordCall::kFetchXor, kFirst, 0, ((kFirst | 2) & kMask) ^ kFirst},
          {WordCall::kCompareSwap, 5, 1, ((kFirst | 2) & kMask) ^ kFirst},
          {WordCall::kCompareSwap, kMany, ((kFirst | 2) & kMask) ^ kFirst, kMany}};
}

template <Scope kScope, typename Word>
Fetched fetch(const World& world, int rank, Word* word, const Step<Word>& step) {
  switch (step.call) {
    case WordCall::kSwap:
      return device::swap<kScope>(world, rank, word, step.value);
    case WordCall::kFetchAdd:
      return device::fetch_add<kScope>(world, rank, word, step.value);
    case WordCall::kFetchOr:
      return device::fetch_or<kScope>(world, rank, word, step.value);
    case WordCall::kFetchAnd:
      return device::fetch_and<kScope>(world, rank, word, step.value);
    case WordCall::kFetchXor:
      return device::fetch_xor<kScope>(world, rank, word, step.value);
    default:
      return device::compare_swap<kScope>(world, rank, word, step.expected, step.value);
  }
}

/// Each rank changes a word of every rank, which no other rank uses; those beside it are left alone.
template <Scope kScope, typename Word>
void check_steps(const OneSidedRanks::Options& options, unsigned num_threads) {
  OneSidedRanks ranks(options);
  const std::vector<Step<Word>> steps = all_steps<Word>();
  int num_errors = 0;
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    ranks.launch(rank, {1, num_threads, 0}, [&, rank] {
      const World world = ranks.world(rank);
      Word* const word = word_at<Word>(ranks, rank, 1 + 2 * rank);
      for (int peer = 0; peer < world.num_ranks; ++peer) {
        Word before = 0;
        for (const Step<Word>& step : steps) {
          const Fetched fetched = fetch<kScope>(world, peer, word, step);
          num_errors += fetched.code != Code::kOk || fetched.value != before;
          before = step.after;
        }
        num_errors += device::signal<kScope>(world, peer, word, 7, SignalOp::kSet) != Code::kOk;
        num_errors += device::quiet<kScope>(world, peer) != Code::kOk;
        num_errors +=
            device::signal<kScope>(world, peer, word, static_cast<Word>(~Word{0} - 1), SignalOp::kAdd) != Code::kOk;
      }
      num_errors += device::quiet<kScope>(world) != Code::kOk;
    });
  }
  ASSERT_EQ(ranks.run(), "") << "seed " << options.seed;
  EXPECT_EQ(num_errors, 0);
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    for (int idx = 0; idx <= 2 * ranks.num_ranks(); ++idx) {
      EXPECT_EQ(*word_at<Word>(ranks, rank, idx), Word(idx % 2 == 1 ? 5 : 0)) << "word " << idx << " of rank " << rank;
    }
  }
}

TEST_P(OneSidedWords, AtomicsReturnWhatWasThereAtEveryScope) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    check_steps<Scope::kThread, std::uint64_t>(options(seed), 1);
    check_steps<Scope::kThread, std::uint32_t>(options(seed), 1);
    check_steps<Scope::kWarp, std::uint64_t>(options(seed), 32);
    check_steps<Scope::kWarp, std::uint32_t>(options(seed), 32);
    check_steps<Scope::kBlock, std::uint64_t>(options(seed), 48);
    check_steps<Scope::kBlock, std::uint32_t>(options(seed), 48);
    if (HasFailure()) return;
  }
}

/// The same by the kernels of the host's calls.
template <typename Word>
void check_host_steps(const OneSidedRanks::Options& options) {
  OneSidedRanks ranks(options);
  const std::vector<Step<Word>> steps = all_steps<Word>();
  const int last = ranks.num_ranks() - 1;
  std::vector<Word> fetched(2 * steps.size(), Word{77});
  for (std::size_t i = 0; i < steps.size(); ++i) {
    cuda::WordParams params;
    params.world = ranks.world(0);
    params.call = steps[i].call;
    params.rank = last;
    params.is_narrow = sizeof(Word) == sizeof(std::uint32_t);
    params.word = word_at<Word>(ranks, 0, 1);
    params.value = steps[i].value;
    params.expected = steps[i].expected;
    params.fetched = &fetched[2 * i];
    cuda::launch_word_call(params, ranks.stream(0));
  }
  ASSERT_EQ(ranks.run(), "");
  Word before = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(fetched[2 * i], before) << "step " << i;
    EXPECT_EQ(fetched[2 * i + 1], Word{77}) << "memory behind the result of step " << i;
    before = steps[i].after;
  }
  EXPECT_EQ(*word_at<Word>(ranks, last, 1), before);
  EXPECT_EQ(*word_at<Word>(ranks, last, 0), 0U);
  EXPECT_EQ(*word_at<Word>(ranks, last, 2), 0U);
}

TEST_P(OneSidedWords, AtomicsOfTheHostAreKernels) {
  check_host_steps<std::uint64_t>(options(1));
  check_host_steps<std::uint32_t>(options(1));
}

/// Threads of all ranks change words of rank 0 that lie side by side. No change may be lost.
template <typename Word>
void check_together(const OneSidedRanks::Options& options) {
  constexpr unsigned kNumThreads = 16;
  constexpr int kNumRounds = 3;  // odd, so that each bit of fetch_xor ends as 1
  OneSidedRanks ranks(options);
  const auto num_ranks = static_cast<unsigned>(ranks.num_ranks());
  Word given = 0;
  Word taken = 0;
  int num_errors = 0;
  const auto all = static_cast<Word>(num_ranks * kNumThreads == 8 * sizeof(Word)
                                         ? ~Word{0}
                                         : (std::uint64_t{1} << (num_ranks * kNumThreads % (8 * sizeof(Word)))) - 1);
  *word_at<Word>(ranks, 0, 3) = ~Word{0};
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    ranks.launch(rank, {1, kNumThreads, 0}, [&, rank] {
      const World world = ranks.world(rank);
      const unsigned id = static_cast<unsigned>(rank) * kNumThreads + threadIdx.x;
      const auto mine = static_cast<Word>(Word{1} << id % (8 * sizeof(Word)));
      for (int round = 0; round < kNumRounds; ++round) {
        const Word value = 1 + id + 1000 * static_cast<Word>(round);
        num_errors += device::fetch_add(world, 0, word_at<Word>(ranks, rank, 0), 1).code != Code::kOk;
        num_errors += device::fetch_xor(world, 0, word_at<Word>(ranks, rank, 1), mine).code != Code::kOk;
        num_errors += device::fetch_or(world, 0, word_at<Word>(ranks, rank, 2), mine).code != Code::kOk;
        num_errors += device::fetch_and(world, 0, word_at<Word>(ranks, rank, 3), Word(~mine)).code != Code::kOk;
        const Fetched held = device::swap(world, 0, word_at<Word>(ranks, rank, 4), value);
        num_errors += held.code != Code::kOk;
        given += value;
        taken += static_cast<Word>(held.value);
      }
    });
  }
  ASSERT_EQ(ranks.run(), "") << "seed " << options.seed;
  EXPECT_EQ(num_errors, 0);
  const bool is_shared = num_ranks * kNumThreads > 8 * sizeof(Word);  // two threads have each bit
  EXPECT_EQ(*word_at<Word>(ranks, 0, 0), num_ranks * kNumThreads * kNumRounds);
  EXPECT_EQ(*word_at<Word>(ranks, 0, 1), is_shared ? Word{0} : all);
  EXPECT_EQ(*word_at<Word>(ranks, 0, 2), is_shared ? Word(~Word{0}) : all);
  EXPECT_EQ(*word_at<Word>(ranks, 0, 3), is_shared ? Word{0} : Word(~all));
  EXPECT_EQ(given, static_cast<Word>(taken + *word_at<Word>(ranks, 0, 4))) << "each swapped value comes back once";
}

TEST_P(OneSidedWords, ManyThreadsLoseNoChangeThroughARingThatIsAlwaysFull) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    OneSidedRanks::Options full = options(seed);
    full.num_slots = 2;
    check_together<std::uint64_t>(full);
    check_together<std::uint32_t>(full);
    if (HasFailure()) return;
  }
}

TEST_P(OneSidedWords, BadArgumentsAreRefusedAndChangeNothing) {
  OneSidedRanks ranks(options(1));
  const std::uint64_t end = 8192;
  std::vector<Code> codes;
  const int last = ranks.num_ranks() - 1;
  const std::vector<std::byte> before(ranks.heap(last), ranks.heap(last) + end);
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    auto* const half = reinterpret_cast<std::uint32_t*>(world.heap + 2);
    auto* const odd = reinterpret_cast<std::uint64_t*>(world.heap + 4);
    auto* const past = reinterpret_cast<std::uint32_t*>(world.heap + end);
    auto* const good = reinterpret_cast<std::uint32_t*>(world.heap);
    codes.push_back(device::quiet(world, world.num_ranks));
    codes.push_back(device::quiet(world, -1));
    codes.push_back(device::signal(world, last, half, 1, SignalOp::kSet));
    codes.push_back(device::signal(world, last, past, 1, SignalOp::kAdd));
    codes.push_back(device::signal(world, -1, good, 1, SignalOp::kAdd));
    codes.push_back(device::fetch_add(world, last, half, 1).code);
    codes.push_back(device::compare_swap(world, last, past, 0, 1).code);
    codes.push_back(device::swap(world, last, odd, 1).code);
    codes.push_back(device::fetch_and(world, world.num_ranks, good, 0).code);
    codes.push_back(device::fetch_or(world, last, half - 1, 1).code);
    codes.push_back(device::fetch_xor(world, last, past, 1).code);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, std::vector<Code>(codes.size(), Code::kInvalidArgument));
  EXPECT_EQ(std::vector<std::byte>(ranks.heap(last), ranks.heap(last) + end), before);
  EXPECT_EQ(ranks.errors(0).call, static_cast<int>(Call::kQuiet)) << "the first error stays";
  EXPECT_EQ(ranks.errors(0).rank, ranks.num_ranks());
}

/// Everything that a rank has asked of another is there after the quiet of that rank, in the memory of both.
TEST_P(OneSidedWords, AQuietOfARankCompletesWhatWasAskedOfIt) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    OneSidedRanks ranks(options(seed));
    const int last = ranks.num_ranks() - 1;
    int num_errors = 0;
    std::uint64_t num_missing = 0;
    for (int i = 0; i < 16; ++i) *ranks.word(last, 128 + i) = static_cast<std::uint64_t>(100 + i);
    ranks.launch(0, {1, 1, 0}, [&] {
      const World world = ranks.world(0);
      for (std::uint64_t round = 1; round <= 8; ++round) {
        for (int i = 0; i < 16; ++i) *ranks.word(0, 256 + i) = round;
        num_errors += device::put_nbi(world, last, ranks.word(0, 64), ranks.word(0, 256), 128) != Code::kOk;
        num_errors += device::signal(world, last, ranks.word(0, kCounter), 1, SignalOp::kAdd) != Code::kOk;
        num_errors += device::get_nbi(world, last, ranks.word(0, 192), ranks.word(0, 128), 128) != Code::kOk;
        num_errors += device::quiet(world, last) != Code::kOk;
        num_missing += *ranks.word(last, 64) != round || *ranks.word(last, 79) != round;
        num_missing += *ranks.word(last, kCounter) != round;
        num_missing += *ranks.word(0, 192) != 100 || *ranks.word(0, 207) != 115;
        for (int i = 0; i < 16; ++i) *ranks.word(0, 192 + i) = 0;
      }
    });
    ASSERT_EQ(ranks.run(), "") << "seed " << seed;
    EXPECT_EQ(num_errors, 0);
    EXPECT_EQ(num_missing, 0U) << "seed " << seed;
  }
}

TEST(OneSidedNodes, AQuietOfARankWaitsForThatRankAlone) {
  OneSidedRanks ranks({.num_ranks = 4, .ranks_per_node = 2});
  ranks.stall(2, true);
  std::vector<Code> codes;
  std::vector<Code> late;
  *ranks.word(2, kCounter) = 5;
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    for (const int rank : {1, 2, 3}) device::signal(world, rank, ranks.word(0, kSignal), 1, SignalOp::kAdd);
    device::get_nbi(world, 2, ranks.word(0, 4), ranks.word(0, kCounter), 8);
    for (const int rank : {3, 1, 0, 3}) codes.push_back(device::quiet(world, rank));
    codes.push_back(*ranks.word(3, kSignal) == 1 && *ranks.word(1, kSignal) == 1 ? Code::kOk : Code::kInvalidArgument);
    late.push_back(device::quiet(world, 2));
    late.push_back(device::quiet(world));
    codes.push_back(device::quiet(world, 3));
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, std::vector<Code>(codes.size(), Code::kOk));
  EXPECT_EQ(late, std::vector<Code>(2, Code::kTimeout));
  EXPECT_EQ(ranks.errors(0).call, static_cast<int>(Call::kQuiet));
  EXPECT_EQ(ranks.errors(0).rank, 2);
  ranks.stall(2, false);
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    // Nothing was asked of it since: this waits for what was.
    codes.push_back(device::quiet(world, 2));
    codes.push_back(*ranks.word(2, kSignal) == 1 && *ranks.word(0, 4) == 5 ? Code::kOk : Code::kInvalidArgument);
    codes.push_back(device::quiet(world));
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, std::vector<Code>(codes.size(), Code::kOk));
}

TEST(OneSidedNodes, AQuietOfALostRankTellsIt) {
  OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1});
  ranks.lose(2, true);
  std::vector<Code> codes;
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    const std::uint64_t one = 1;
    device::put(world, 2, ranks.word(0, 4), &one, sizeof(one));
    device::put(world, 1, ranks.word(0, 4), &one, sizeof(one));
    codes.push_back(device::quiet(world, 1));
    codes.push_back(device::quiet(world, 2));
    codes.push_back(device::quiet(world, 2));  // nothing was lost since
    codes.push_back(device::quiet(world, 1));
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, (std::vector<Code>{Code::kOk, Code::kPeerLost, Code::kOk, Code::kOk}));
  EXPECT_EQ(*ranks.word(1, 4), 1U);
  EXPECT_EQ(ranks.errors(0).rank, 2);
}

}  // namespace
}  // namespace ferry::emulator
