/// One-sided calls of kernels that are invalid, that no rank answers, or whose peers are lost.

#include "ferry/device/one_sided.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "emulator/one_sided_case.hpp"

namespace ferry::emulator {
namespace {

using device::Code;
using device::Scope;
using device::World;

class OneSidedErrors : public OnNodes {};
INSTANTIATE_TEST_SUITE_P(Shapes, OneSidedErrors, all_shapes(), shape_name);

TEST_P(OneSidedErrors, BadArgumentsAreRefusedAndRecorded) {
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
    codes.push_back(device::put_value(world, 1, past, 1));
    codes.push_back(device::get_value(world, -1, ranks.word(0, kSignal)).code);
    // Misaligned addresses on this rank and on the last one, which may be in another node.
    auto* const half = reinterpret_cast<std::uint32_t*>(world.heap + 2);
    for (const int rank : {0, world.num_ranks - 1}) {
      codes.push_back(device::put_value(world, rank, odd, 1));
      codes.push_back(device::put_value(world, rank, half, 1));
      codes.push_back(device::get_value(world, rank, odd).code);
      codes.push_back(device::get_value(world, rank, half).code);
    }
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

TEST_P(OneSidedErrors, AWaitWithoutAnAnswerEndsByItsDeadline) {
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

TEST_P(OneSidedErrors, TheLongestDeadlineIsNotOver) {
  OneSidedRanks ranks(options(1));
  Code code = Code::kTimeout;
  ranks.launch(0, {1, 1, 0}, [&] {
    code = device::wait_until(ranks.world(0), ranks.word(0, kSignal), Comparison::kEqual, 1, ~std::uint64_t{0});
  });
  ranks.launch(1, {1, 1, 0}, [&] {
    const World world = ranks.world(1);
    // Waits much longer than the first polls of the other rank.
    device::wait_until(world, ranks.word(1, kSignal), Comparison::kEqual, 1, 1'000'000);
    device::signal(world, 0, ranks.word(1, kSignal), 1, SignalOp::kSet);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(code, Code::kOk);
}

TEST_P(OneSidedErrors, ARankThatNeverComesEndsTheBarrierOfTheOthers) {
  OneSidedRanks ranks(options(1));
  Code code = Code::kOk;
  ranks.launch(0, {1, 32, 0}, [&] { code = device::barrier<Scope::kWarp>(ranks.world(0), ranks.team(0)); });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(code, Code::kTimeout);
  EXPECT_EQ(ranks.errors(0).call, static_cast<int>(device::Call::kBarrier));
}

/// Makes more calls than there are places for their answers; each answer must arrive.
void count(const World& world, int rank, std::uint64_t* word, std::uint64_t first, std::vector<Code>& codes) {
  for (std::uint64_t i = 0; i < 2 * device::kNumReplies; ++i) {
    const device::Fetched fetched = device::fetch_add(world, rank, word, 1);
    codes.push_back(fetched.value == first + i ? fetched.code : Code::kInvalidArgument);
  }
}

TEST(OneSidedNodes, ALostPeerEndsWhatWaitsForIt) {
  for (const bool told : {true, false}) {
    OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1});
    ranks.lose(2, told);
    std::vector<Code> codes;
    std::vector<Code> others;
    ranks.launch(0, {1, 1, 0}, [&] {
      const World world = ranks.world(0);
      const std::uint64_t one = 1;
      device::put(world, 2, ranks.word(0, 4), &one, sizeof(one));
      codes.push_back(device::quiet(world));
      codes.push_back(device::fetch_add(world, 2, ranks.word(0, 4), 1).code);
      for (std::uint64_t i = 0; i < device::kNumReplies; ++i) {
        codes.push_back(device::fetch_add(world, 2, ranks.word(0, 4), 1).code);
      }
      device::quiet(world);
      // The other ranks are not lost.
      device::put(world, 1, ranks.word(0, 4), &one, sizeof(one));
      codes.push_back(device::quiet(world));
      // Reuses also the places reserved for the lost answers.
      count(world, 1, ranks.word(0, kCounter), 0, others);
    });
    ASSERT_EQ(ranks.run(), "");
    std::vector<Code> expected(device::kNumReplies + 2, Code::kPeerLost);
    expected.push_back(Code::kOk);
    EXPECT_EQ(codes, expected);
    EXPECT_EQ(others, std::vector<Code>(others.size(), Code::kOk));
    EXPECT_EQ(*ranks.word(1, 4), 1U);
    EXPECT_EQ(ranks.errors(0).code, static_cast<int>(Code::kPeerLost));
  }
}

TEST(OneSidedNodes, WhatAPeerDoesNotAnswerEndsByItsDeadlineAndTheRestGoesOn) {
  constexpr std::size_t kNumBytes = 100;  // in two pieces
  OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1});
  ranks.stall(2, true);
  std::vector<std::byte> got(kNumBytes, std::byte{0xEE});
  const std::vector<std::byte> before = got;
  std::vector<Code> late;
  std::vector<Code> others;
  unsigned num_in_vain = 0;
  ranks.launch(0, {1, 64, 0}, [&] {
    const World world = ranks.world(0);
    const auto note = [&](Code code) {
      if (device::is_leader<Scope::kBlock>()) late.push_back(code);
    };
    note(device::get<Scope::kBlock>(world, 2, got.data(), ranks.heap(0) + kRowOffset, kNumBytes));
    if (threadIdx.x < 32) {
      const Code code = device::get<Scope::kWarp>(world, 2, got.data(), ranks.heap(0) + kRowOffset, kNumBytes);
      if (device::is_leader<Scope::kWarp>()) late.push_back(code);
    }
    if (device::is_leader<Scope::kBlock>()) {
      late.push_back(device::fetch_add(world, 2, ranks.word(0, kCounter), 1).code);
      late.push_back(device::compare_swap(world, 2, ranks.word(0, kSignal), 5, 6).code);
      const std::uint64_t one = 1;
      device::put(world, 2, ranks.word(0, 4), &one, sizeof(one));
    }
    note(device::quiet<Scope::kBlock>(world));
    if (device::is_leader<Scope::kBlock>()) count(world, 1, ranks.word(0, kCounter), 0, others);
  });
  // As many calls as there are places for answers, and more.
  ranks.launch(0, {1, device::kNumReplies, 0}, [&] {
    for (int i = 0; i < 2; ++i) {
      num_in_vain += device::fetch_add(ranks.world(0), 2, ranks.word(0, 5), 1).code == Code::kTimeout;
    }
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(late, std::vector<Code>(5, Code::kTimeout));
  EXPECT_EQ(others, std::vector<Code>(others.size(), Code::kOk)) << "calls between other ranks are unaffected";
  EXPECT_EQ(num_in_vain, 2 * device::kNumReplies);
  EXPECT_EQ(got, before);
  EXPECT_EQ(ranks.errors(0).call, static_cast<int>(device::Call::kGet));
  EXPECT_EQ(ranks.errors(0).rank, 2);
  ranks.stall(2, false);
  std::vector<Code> again;
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    again.push_back(device::quiet(world));
    count(world, 2, ranks.word(0, kCounter), 1, again);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(again, std::vector<Code>(again.size(), Code::kOk)) << "calls after the late answers";
  EXPECT_EQ(*ranks.word(2, 4), 1U);
  EXPECT_EQ(got, before) << "late answers must change no result";
}

/// The network may still write data that was requested before the rank was lost.
TEST(OneSidedNodes, WhereALostGetWasToComeNothingElseComes) {
  constexpr std::size_t kNumBytes = 24;
  constexpr std::uint64_t kNumGets = 2 * device::kNumReplies;
  OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1});
  ranks.stall(2, true);
  for (std::size_t b = 0; b < kNumBytes; ++b) ranks.heap(1)[kRowOffset + b] = pattern(1, 0, b);
  const World world = ranks.world(0);
  std::byte* const staging = world.ring.staging + world.ring.num_slots * world.ring.slot_bytes;
  const std::size_t staging_bytes = device::kNumReplies * world.ring.slot_bytes;
  Code lost = Code::kOk;
  Code quiet = Code::kOk;
  std::uint64_t num_good = 0;
  ranks.launch(0, {1, 1, 0}, [&] {
    std::vector<std::byte> got(kNumBytes);
    lost = device::get(world, 2, got.data(), ranks.heap(0) + kRowOffset, kNumBytes);
    quiet = device::quiet(world);
    std::fill(staging, staging + staging_bytes, std::byte{0xEE});
    for (std::uint64_t i = 0; i < kNumGets; ++i) {
      std::fill(got.begin(), got.end(), std::byte{0});
      const Code code = device::get(world, 1, got.data(), ranks.heap(0) + kRowOffset, kNumBytes);
      num_good += code == Code::kOk && std::equal(got.begin(), got.end(), ranks.heap(1) + kRowOffset);
    }
  });
  ranks.launch(1, {1, 1, 0}, [&] {
    // Waits until the get is in progress.
    while (ranks.source(0).num_taken() == 0) {
      device::wait_until(ranks.world(1), ranks.word(1, kSignal), Comparison::kEqual, 1, 1000);
    }
    ranks.lose(2, false);
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(lost, Code::kPeerLost);
  EXPECT_EQ(quiet, Code::kPeerLost);
  EXPECT_EQ(num_good, kNumGets);
  std::uint64_t num_untouched = 0;
  for (std::uint64_t place = 0; place < device::kNumReplies; ++place) {
    const std::byte* const first = staging + place * world.ring.slot_bytes;
    num_untouched += std::all_of(first, first + kNumBytes, [](std::byte b) { return b == std::byte{0xEE}; });
  }
  EXPECT_EQ(num_untouched, 1U) << "only the place of the lost get";
}

TEST(OneSidedNodes, AWaitEndsWhenTheHostFindsARankLost) {
  OneSidedRanks ranks({.num_ranks = 2, .ranks_per_node = 1});
  ranks.errors(0).stop = device::stop_word::kRankLost;
  Code code = Code::kOk;
  ranks.launch(0, {1, 1, 0},
               [&] { code = device::wait_until(ranks.world(0), ranks.word(0, kSignal), Comparison::kEqual, 1); });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(code, Code::kPeerLost);
}

TEST(OneSidedNodes, ARankThatDoesNotAnswerHoldsUpNoOther) {
  constexpr std::uint64_t kRounds = 40;  // rounds with more requests than the ring has room for
  constexpr std::size_t kNumBytes = 30;
  OneSidedRanks ranks({.num_ranks = 4, .ranks_per_node = 2});
  ranks.stall(2, true);
  std::vector<Code> codes;
  std::uint64_t num_missing = 0;
  Code late = Code::kOk;
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    std::vector<std::byte> bytes(kNumBytes);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      for (const int rank : {2, 3}) {
        std::fill(bytes.begin(), bytes.end(), pattern(rank, static_cast<int>(round), 0));
        codes.push_back(device::put_signal(world, rank, world.heap + kRowOffset, bytes.data(), kNumBytes,
                                           ranks.word(0, kSignal), round, SignalOp::kSet));
        codes.push_back(device::fence(world, rank));
      }
      // The proxy also changes words of this node.
      codes.push_back(device::signal(world, 1, ranks.word(0, kSignal), 1, SignalOp::kAdd));
      const device::Fetched fetched = device::fetch_add(world, 3, ranks.word(0, kCounter), 1);
      codes.push_back(fetched.code);
      num_missing += fetched.value != round - 1;
    }
    late = device::quiet(world);
  });
  ranks.launch(3, {1, 1, 0}, [&] {
    const World world = ranks.world(3);
    codes.push_back(device::wait_until(world, ranks.word(3, kSignal), Comparison::kEqual, kRounds));
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(codes, std::vector<Code>(codes.size(), Code::kOk));
  EXPECT_EQ(num_missing, 0U);
  EXPECT_EQ(*ranks.word(1, kSignal), kRounds);
  EXPECT_EQ(late, Code::kTimeout) << "quiet waits for all ranks";
  EXPECT_EQ(*ranks.word(2, kSignal), 0U);
  ranks.stall(2, false);
  ranks.launch(0, {1, 1, 0}, [&] { late = device::quiet(ranks.world(0)); });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(late, Code::kOk);
  for (const int rank : {2, 3}) {
    EXPECT_EQ(*ranks.word(rank, kSignal), kRounds) << "the last signal follows the others";
    const std::vector<std::byte> last(kNumBytes, pattern(rank, kRounds, 0));
    EXPECT_TRUE(std::equal(last.begin(), last.end(), ranks.heap(rank) + kRowOffset)) << "and the last put";
  }
}

/// If there is no more room for one rank's requests, that rank blocks requests to the others.
TEST(OneSidedNodes, ARingThatACallHasLeftFullIsOverAndTheHostIsToldWhy) {
  OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1, .max_held_bytes = 0});
  ranks.stall(2, true);
  std::vector<Code> taken;
  std::vector<Code> behind;
  const auto use = [&] {
    const World world = ranks.world(0);
    behind.push_back(device::fetch_add(world, 1, ranks.word(0, kCounter), 1).code);
    behind.push_back(device::quiet(world));
  };
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    taken.push_back(device::put_value(world, 2, ranks.word(0, 4), 1));
    taken.push_back(device::fence(world, 2));
    // Follows the fence, which waits until the put has arrived.
    taken.push_back(device::put_value(world, 2, ranks.word(0, 4), 2));
    for (std::uint64_t i = 1; i < world.ring.num_slots; ++i) {
      taken.push_back(device::put_value(world, 1, ranks.word(0, 4), i));
    }
    EXPECT_TRUE(ranks.source(0).status().ok()) << "a full ring is no error";
    behind.push_back(device::put_value(world, 1, ranks.word(0, 5), 1));
    use();
  });
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(taken, std::vector<Code>(taken.size(), Code::kOk));
  EXPECT_EQ(behind, std::vector<Code>(behind.size(), Code::kTimeout));
  const Status why = ranks.source(0).status();
  EXPECT_EQ(why.code(), ErrorCode::kTimeout);
  EXPECT_EQ(why.peer(), 2);
  EXPECT_NE(why.message().find("rank 2"), std::string::npos) << why.message();
  // The failure is permanent.
  ranks.stall(2, false);
  ranks.launch(0, {1, 1, 0}, use);
  ASSERT_EQ(ranks.run(), "");
  EXPECT_EQ(behind, std::vector<Code>(behind.size(), Code::kTimeout));
  EXPECT_EQ(ranks.source(0).status().message(), why.message());
  EXPECT_EQ(*ranks.word(1, 5), 0U);
}

/// Codes of rank 0's calls while rank 2 does not answer, which it does only after many polls. There is no deadline.
std::vector<Code> codes_of(std::uint64_t stop, const std::function<void(const World&, std::vector<Code>&)>& calls) {
  OneSidedRanks ranks({.num_ranks = 3, .ranks_per_node = 1, .max_held_bytes = 0});
  ranks.errors(0).stop = stop;
  ranks.stall(2, true);
  std::vector<Code> codes;
  World world = ranks.world(0);
  world.timeout_ns = ~std::uint64_t{0};
  world.stored = &world;
  ranks.launch(0, {1, 1, 0}, [&] { calls(world, codes); });
  ranks.launch(1, {1, 1, 0}, [&] {
    constexpr int kManyLooks = 10'000;  // a wait polls the host's word every 256 polls
    for (int look = 0; look < kManyLooks; ++look) device::test(ranks.word(1, kSignal), Comparison::kEqual, 1);
    ranks.stall(2, false);
  });
  EXPECT_EQ(ranks.run(), "");
  return codes;
}

TEST(OneSidedNodes, TheProxyIsWaitedForThoughARankIsLostButNotAtTheEnd) {
  const auto fetch = [](const World& world, std::vector<Code>& codes) {
    codes.push_back(device::fetch_add(world, 2, reinterpret_cast<std::uint64_t*>(world.heap), 1).code);
  };
  const auto put_and_quiet = [](const World& world, std::vector<Code>& codes) {
    codes.push_back(device::put_value(world, 2, reinterpret_cast<std::uint64_t*>(world.heap), 1));
    codes.push_back(device::quiet(world));
  };
  const auto fill_the_ring = [](const World& world, std::vector<Code>& codes) {
    codes.push_back(device::put_value(world, 2, reinterpret_cast<std::uint64_t*>(world.heap), 1));
    codes.push_back(device::fence(world, 2));
    for (std::uint64_t i = 0; i <= world.ring.num_slots; ++i) {
      codes.push_back(device::put_value(world, 2, reinterpret_cast<std::uint64_t*>(world.heap), i));
    }
  };
  for (const std::function<void(const World&, std::vector<Code>&)>& calls :
       {std::function(fetch), std::function(put_and_quiet), std::function(fill_the_ring)}) {
    std::vector<Code> codes = codes_of(device::stop_word::kRankLost, calls);
    EXPECT_EQ(codes, std::vector<Code>(codes.size(), Code::kOk));
    codes = codes_of(device::stop_word::kOver, calls);
    ASSERT_FALSE(codes.empty());
    EXPECT_EQ(codes.back(), Code::kPeerLost) << "before rank 2 answers";
  }
}

TEST(OneSidedNodes, ARequestThatIsCutShortEndsWithTheReadersError) {
  OneSidedRanks ranks({.num_ranks = 2, .ranks_per_node = 1});
  std::vector<Code> codes;
  ranks.launch(0, {1, 1, 0}, [&] {
    const World world = ranks.world(0);
    // A request that device code must never make.
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
