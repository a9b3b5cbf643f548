/// Atomics of kernels on words of any rank, in a node and over a network.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "emulator/one_sided_case.hpp"
#include "ferry/device/one_sided.cuh"

namespace ferry::emulator {
namespace {

using device::Code;
using device::Scope;
using device::World;

constexpr std::uint64_t kNumSeeds = 6;

class OneSidedAtomics : public OnNodes {};
INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedAtomics, all_shapes(), shape_name);

TEST_P(OneSidedAtomics, ManyThreadsCountAndLockThroughARingThatIsAlwaysFull) {
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
        // Exactly one of all threads finds 0.
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

/// Blocks of all ranks reserve room for their threads, one place per thread: no two threads may get the same place.
template <Scope kScope>
void check_rooms(const OneSidedRanks::Options& options, unsigned num_threads) {
  constexpr int kNumRounds = 3;
  OneSidedRanks ranks(options);
  int num_errors = 0;
  std::vector<std::uint64_t> places;
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    ranks.launch(rank, {1, num_threads, 0}, [&, rank] {
      const World world = ranks.world(rank);
      const unsigned num_members = device::Members<kScope>::count();
      for (int round = 0; round < kNumRounds; ++round) {
        const device::Fetched room = device::fetch_add<kScope>(world, 0, ranks.word(rank, kCounter), num_members);
        num_errors += room.code != Code::kOk;
        places.push_back(room.value + device::Members<kScope>::idx());
      }
      // All threads that see 0 belong to one scope.
      const device::Fetched first = device::compare_swap<kScope>(world, 1, ranks.word(rank, 3), 0, 7);
      num_errors += first.code != Code::kOk || (first.value != 0 && first.value != 7);
      if (first.value == 0) device::signal(world, 0, ranks.word(rank, 2), 1, SignalOp::kAdd);
      num_errors += device::quiet(world) != Code::kOk;
    });
  }
  ASSERT_EQ(ranks.run(), "") << "seed " << options.seed;
  EXPECT_EQ(num_errors, 0);
  std::sort(places.begin(), places.end());
  std::vector<std::uint64_t> expected(static_cast<std::size_t>(ranks.num_ranks()) * num_threads * kNumRounds);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(places, expected);
  EXPECT_EQ(*ranks.word(0, 2), kScope == Scope::kBlock ? num_threads : device::kLanes) << "all of the first scope";
}

TEST_P(OneSidedAtomics, AWarpOrABlockFetchesOnceForAllItsThreads) {
  for (std::uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    check_rooms<Scope::kWarp>(options(seed), 64);
    check_rooms<Scope::kBlock>(options(seed), 96);
    check_rooms<Scope::kBlock>(options(seed), 24);  // no whole warp
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace ferry::emulator
