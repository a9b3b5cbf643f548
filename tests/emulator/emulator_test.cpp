/// Tests of the emulator: grids that wait for each other, and errors that it must find.

#include "emulator/emulator.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace ferry::emulator {
namespace {

constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;

TEST(Emulator, BlocksAndGridsWaitForEachOther) {
  constexpr unsigned kNumBlocks = 4;
  Machine machine(7);
  std::vector<int> seen(2 * kNumBlocks);
  volatile int flags[2] = {0, 0};
  for (int rank = 0; rank < 2; ++rank) {
    const cudaStream_t stream = machine.add_stream();
    machine.launch(stream, {kNumBlocks, 64, 0}, [rank, &flags, &seen] {
      const auto block = place().block.x;
      if (place().thread.x == 0 && block + 1 == kNumBlocks) {
        about_to_store();
        flags[rank] = 1;
      }
      if (place().thread.x == 0) {
        while (flags[1 - rank] == 0) poll();
      }
      const bool all = meet_block(place().thread.x != 0 || flags[1 - rank] != 0).all;
      if (place().thread.x == 0) seen[static_cast<std::size_t>(rank) * kNumBlocks + block] = all ? 1 : 0;
    });
  }
  EXPECT_EQ(machine.run(), "");
  EXPECT_EQ(seen, std::vector<int>(2 * kNumBlocks, 1));
}

TEST(Emulator, WorkOfAStreamRunsInOrder) {
  Machine machine(1);
  const cudaStream_t stream = machine.add_stream();
  std::vector<int> order;
  for (int i = 0; i < 3; ++i) {
    machine.launch(stream, {1, 32, 0}, [i, &order] {
      if (place().thread.x == 0) order.push_back(2 * i);
    });
    machine.enqueue(stream, [i, &order] { order.push_back(2 * i + 1); });
  }
  EXPECT_EQ(machine.run(), "");
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5}));
}

TEST(Emulator, LanesExchangeWhatTheyGive) {
  Machine machine(3);
  std::vector<std::uint64_t> got(64);
  machine.launch(machine.add_stream(), {1, 64, 0}, [&got] {
    const unsigned thread = place().thread.x;
    for (std::uint64_t round = 0; round < 10; ++round) {
      got[thread] += meet_lanes("exchange", kAllLanes, thread * round)[(thread + 1) % 32];
    }
  });
  EXPECT_EQ(machine.run(), "");
  for (unsigned thread = 0; thread < 64; ++thread) EXPECT_EQ(got[thread], 45 * (thread / 32 * 32 + (thread + 1) % 32));
}

TEST(Emulator, LanesReadWhatTheyExchangedAfterOthersHaveMetAgain) {
  constexpr std::uint32_t kFirstHalf = 0xFFFFU;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Machine machine(seed);
    std::vector<std::uint64_t> got(32);
    machine.launch(machine.add_stream(), {1, 32, 0}, [&got] {
      const unsigned lane = place().thread.x;
      const std::uint64_t* const lanes = meet_lanes("all", kAllLanes, lane);
      got[lane] = lanes[(lane + 1) % 32];
      for (int i = 0; i < 3 && lane < 16; ++i) meet_lanes("half", kFirstHalf, 100 + lane);
    });
    EXPECT_EQ(machine.run(), "");
    for (unsigned lane = 0; lane < 32; ++lane) EXPECT_EQ(got[lane], (lane + 1) % 32) << "seed " << seed;
  }
}

TEST(Emulator, ClockMovesOnlyWhenNothingElseDoes) {
  Machine machine(5);
  std::uint64_t before = 0;
  std::uint64_t after = 0;
  machine.launch(machine.add_stream(), {1, 32, 0}, [&] {
    if (place().thread.x != 0) return;
    before = now_ns();
    while (now_ns() == before) poll();
    after = now_ns();
  });
  EXPECT_EQ(machine.run(), "");
  EXPECT_GT(after, before);
}

TEST(Emulator, FindsLanesThatPart) {
  Machine machine(2);
  machine.launch(machine.add_stream(), {1, 32, 0},
                 [] { meet_lanes(place().thread.x == 5 ? "left" : "right", kAllLanes, 0); });
  EXPECT_NE(machine.run().find("lanes of a warp diverge"), std::string::npos);
}

TEST(Emulator, FindsLanesThatNeverCome) {
  Machine machine(2);
  machine.launch(machine.add_stream(), {1, 32, 0}, [] {
    if (place().thread.x != 5) meet_lanes("all", kAllLanes, 0);
  });
  EXPECT_NE(machine.run().find("no thread can continue"), std::string::npos);
}

TEST(Emulator, FindsWaitsThatNothingEnds) {
  Machine machine(2);
  volatile int flag = 0;
  machine.launch(machine.add_stream(), {1, 32, 0}, [&flag] {
    while (flag == 0) poll();
  });
  EXPECT_NE(machine.run().find("no progress"), std::string::npos);
}

TEST(Emulator, FindsThreadsThatUseMoreThanTheirStack) {
  Machine machine(2);
  machine.launch(machine.add_stream(), {1, 32, 0}, [] {
    if (place().thread.x != 31) return;
    volatile std::byte local[33 << 10];
    for (volatile std::byte& byte : local) byte = std::byte{1};
  });
  EXPECT_EQ(machine.run(), "a thread used more than its stack");
}

TEST(Emulator, FindsWritesPastSharedMemory) {
  Machine machine(2);
  machine.launch(machine.add_stream(), {1, 32, 64}, [] { dynamic_shared()[64 + place().thread.x] = std::byte{1}; });
  EXPECT_NE(machine.run().find("past its shared memory"), std::string::npos);
}

}  // namespace
}  // namespace ferry::emulator
