/// Guarantees of every network engine for reads and atomics of a peer's memory, and requests that it refuses.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "support/loopback_faults.hpp"
#include "support/net_ends.hpp"

namespace ferry::test {
namespace {

using net::AtomicOp;
using Kind = net::AtomicOp::Kind;

struct RemoteCase {
  const char* engine;
  bool engine_allocates;  ///< over UCX the ends then reach each other's memory by stores
};

class NetRemote : public testing::TestWithParam<RemoteCase> {
 protected:
  NetShape shape(std::size_t memory_bytes) const {
    NetShape made{.num_ends = 3, .num_channels = 2, .memory_bytes = memory_bytes};
    made.engine_allocates = GetParam().engine_allocates;
    if (made.engine_allocates) made.hosts = {0, 0, 0};
    return made;
  }
};

std::vector<RemoteCase> cases() {
  std::vector<RemoteCase> all;
  for (const char* engine : {FERRY_TEST_ENGINES}) {
    all.push_back({engine, false});
    all.push_back({engine, true});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(, NetRemote, testing::ValuesIn(cases()), [](const auto& instance) {
  return std::string(instance.param.engine) + (instance.param.engine_allocates ? "_own_memory" : "");
});

TEST_P(NetRemote, AGetReadsThePeersMemory) {
  constexpr std::size_t kBytes = 1'000'001;
  NetEnds ends(GetParam().engine, shape(kBytes + 8));
  ends.connect();
  std::ranges::copy(net_pattern(kBytes, 5), ends[1].memory.begin());
  std::vector<std::byte> got(kBytes - 7);
  std::vector<std::byte> word(8);
  ends[0].engine->get(1, got, 7, 11);
  ends[0].engine->get(1, word, 16, 12);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.size() == 2; }));
  const std::vector<std::byte> all = net_pattern(kBytes, 5);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), all.begin() + 7));
  EXPECT_TRUE(std::equal(word.begin(), word.end(), all.begin() + 16));
}

TEST_P(NetRemote, AtomicsAddUpAndAnswerWhatWasThere) {
  NetEnds ends(GetParam().engine, shape(4096));
  ends.connect();
  auto* word = reinterpret_cast<std::uint64_t*>(ends[2].memory.data() + 64);
  constexpr std::uint64_t kEach = 500;
  for (std::uint64_t i = 1; i <= kEach; ++i) {
    for (const int from : {0, 1}) {
      ends[from].engine->atomic(2, 0, {.kind = Kind::kAdd, .offset = 64, .operand = 1}, i);
    }
  }
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.size() == kEach && ends[1].completed.size() == kEach; }));
  EXPECT_EQ(*word, 2 * kEach);
  std::set<std::uint64_t> before;
  for (const int from : {0, 1}) {
    for (const auto& [ticket, value] : ends[from].completed) before.insert(value);
  }
  EXPECT_EQ(before.size(), 2 * kEach) << "each found a different value";

  ends[0].engine->atomic(2, 0, {.kind = Kind::kCompareSwap, .offset = 64, .operand = 7, .compare = 3}, 1001);
  ends[0].engine->flush(2, 1002);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(1002); }));
  EXPECT_EQ(ends[0].completed.at(1001), 2 * kEach);
  EXPECT_EQ(*word, 2 * kEach) << "the word was not 3";
  ends[0].engine->atomic(2, 0, {.kind = Kind::kCompareSwap, .offset = 64, .operand = 7, .compare = 2 * kEach}, 1003);
  ends[0].engine->flush(2, 1004);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(1004); }));
  EXPECT_EQ(*word, 7U);
  ends[0].engine->atomic(2, 0, {.kind = Kind::kSet, .offset = 64, .operand = 9}, net::kNoTicket);
  ends[0].engine->flush(2, 1005);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(1005); }));
  EXPECT_EQ(*word, 9U);
  EXPECT_FALSE(ends[0].completed.contains(net::kNoTicket));
}

TEST_P(NetRemote, AtomicsOfEachKindChangeTheirWordAlone) {
  NetEnds ends(GetParam().engine, shape(4096));
  ends.connect();
  constexpr std::uint64_t kBefore = 0xF0F1'F2F3'8485'8687;
  auto* word = reinterpret_cast<std::uint64_t*>(ends[1].memory.data() + 64);
  std::uint64_t ticket = 0;
  const auto apply = [&](const AtomicOp& op) {
    *word = kBefore;
    ends[0].engine->atomic(1, 0, op, ++ticket);
    ends[0].engine->flush(1, ++ticket);
    EXPECT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(ticket); }));
    return ends[0].completed[ticket - 1];
  };
  struct Change {
    Kind kind;
    std::uint64_t wide;   // the word after the operand 0x80000000FFFF8001, if compared with kBefore
    std::uint32_t upper;  // and its upper half after the operand 0xFFFF8001
  };
  for (const auto& [kind, wide, upper] :
       {Change{Kind::kSet, 0x8000'0000'FFFF'8001, 0xFFFF'8001}, Change{Kind::kAdd, 0x70F1'F2F4'8485'0688, 0xF0F1'72F4},
        Change{Kind::kCompareSwap, 0x8000'0000'FFFF'8001, 0xFFFF'8001},
        Change{Kind::kAnd, 0x8000'0000'8485'8001, 0xF0F1'8001}, Change{Kind::kOr, 0xF0F1'F2F3'FFFF'8687, 0xFFFF'F2F3},
        Change{Kind::kXor, 0x70F1'F2F3'7B7A'0686, 0x0F0E'72F2}}) {
    EXPECT_EQ(apply({.kind = kind, .offset = 64, .operand = 0x8000'0000'FFFF'8001, .compare = kBefore}), kBefore);
    EXPECT_EQ(*word, wide) << static_cast<int>(kind);
    EXPECT_EQ(apply({.kind = kind, .word_bytes = 4, .offset = 68, .operand = 0xFFFF'8001, .compare = kBefore >> 32}),
              kBefore >> 32);
    EXPECT_EQ(*word, (std::uint64_t{upper} << 32) + (kBefore & 0xFFFF'FFFF)) << static_cast<int>(kind);
    if (HasFailure()) return;
  }
}

TEST_P(NetRemote, AnAtomicComesAfterThePutsOfItsChannelAndAFlushAfterAll) {
  constexpr std::size_t kBytes = 300'000;
  net::LoopbackFaults faults;
  faults.scramble(3);
  NetEnds ends(GetParam().engine, shape(3 * kBytes));
  ends.connect();
  auto* word = reinterpret_cast<std::uint64_t*>(ends[1].memory.data());
  for (std::uint64_t round = 1; round <= 20; ++round) {
    const std::vector<std::byte> first = net_pattern(kBytes, round);
    const std::vector<std::byte> second = net_pattern(kBytes, 1000 + round);
    ends[0].engine->put_from(1, 0, first, 8);
    ends[0].engine->atomic(1, 0, {.kind = Kind::kAdd, .offset = 0, .operand = 1}, net::kNoTicket);
    ends[0].engine->put_from(1, 1, second, 8 + kBytes);
    ends[0].engine->flush(1, round);
    ASSERT_TRUE(ends.poll_until([&] { return *word == round; }));
    EXPECT_TRUE(std::equal(first.begin(), first.end(), ends[1].memory.begin() + 8)) << "round " << round;
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(round); }));
    EXPECT_TRUE(std::equal(second.begin(), second.end(), ends[1].memory.begin() + 8 + kBytes)) << "round " << round;
  }
}

/// The calls of latency mode to another node: a front and its number, rows and theirs, and the end of the sources.
/// Sizes around those up to which an engine makes puts messages.
TEST_P(NetRemote, SourcesThatWereGivenBackMayChange) {
  constexpr std::size_t kLimit = 16384;
  constexpr std::size_t kMost = 2 * kLimit;
  net::LoopbackFaults faults;
  faults.scramble(5);
  NetEnds ends(GetParam().engine, shape(3 * kMost));
  ends.connect();
  auto* word = reinterpret_cast<std::uint64_t*>(ends[1].memory.data());
  std::uint64_t number = 0;
  for (const std::size_t front : {std::size_t{8}, std::size_t{1024}, kLimit, kLimit + 1}) {
    for (const std::size_t rows : {std::size_t{64}, kLimit - 1, kLimit, kLimit + 1, kMost}) {
      ++number;
      const std::vector<std::byte> first = net_pattern(front, number);
      const std::vector<std::byte> second = net_pattern(rows, 1000 + number);
      std::vector<std::byte> sent_first = first;
      std::vector<std::byte> sent_second = second;
      ends[0].engine->put_atomic(1, 0, sent_first, 16, {.kind = Kind::kSet, .offset = 0, .operand = number});
      ends[0].engine->put_atomic(1, 0, sent_second, 16 + kMost, {.kind = Kind::kSet, .offset = 8, .operand = number});
      ends[0].engine->release(1, number);
      ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(number); }));
      std::ranges::fill(sent_first, std::byte{0xEE});
      std::ranges::fill(sent_second, std::byte{0xEE});
      ASSERT_TRUE(ends.poll_until([&] { return word[0] == number; }));
      EXPECT_TRUE(std::equal(first.begin(), first.end(), ends[1].memory.begin() + 16)) << front << " and " << rows;
      ASSERT_TRUE(ends.poll_until([&] { return word[1] == number; }));
      EXPECT_TRUE(std::equal(second.begin(), second.end(), ends[1].memory.begin() + 16 + kMost))
          << front << " and " << rows;
    }
  }
}

TEST_P(NetRemote, ASourceMayChangeOnceItIsReleased) {
  constexpr std::size_t kBytes = 5000;
  constexpr std::uint64_t kRounds = 20;
  NetEnds ends(GetParam().engine, shape(kRounds * kBytes + 8));
  ends.connect();
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    std::vector<std::byte> source = net_pattern(kBytes, round);
    ends[0].engine->put_atomic(1, 0, source, round * kBytes,
                               {.kind = Kind::kAdd, .offset = kRounds * kBytes, .operand = 1});
    if (!ends[0].engine->is_released(1)) {
      ends[0].engine->release(1, round + 1);
      ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(round + 1); }));
    }
    std::ranges::fill(source, std::byte{0xFF});
  }
  ends[0].engine->flush(1, kRounds + 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(kRounds + 1); }));
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    EXPECT_TRUE(std::ranges::equal(ends[1].memory.subspan(round * kBytes, kBytes), net_pattern(kBytes, round)));
  }
}

TEST_P(NetRemote, NothingIsWrittenForAGetThatIsForgotten) {
  NetEnds ends(GetParam().engine, shape(4096));
  ends.connect();
  ends[1].memory[0] = std::byte{1};
  std::vector<std::byte> got(64);
  ends[0].engine->get(1, got, 0, 1);
  ends[0].engine->forget(1);
  // A get by loads has written before it could be forgotten.
  std::ranges::fill(got, std::byte{0xEE});
  ends[0].engine->flush(1, 2);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(2); }));
  for (int i = 0; i < 100; ++i) ends.poll();
  // A card writes by itself.
  if (ends[0].engine->paths().at(0).description.starts_with("rc")) return;
  EXPECT_EQ(std::ranges::count(got, std::byte{0xEE}), std::ssize(got));
}

/// The caller has been told of the loss, and may have freed the memory.
TEST_P(NetRemote, NothingIsWrittenForAGetOnceItsPeerIsLost) {
  constexpr std::size_t kBytes = 1'000'000;
  NetEnds ends(GetParam().engine, shape(kBytes));
  ends.connect();
  ends[0].engine->flush(1, 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].completed.contains(1); }));
  std::ranges::copy(net_pattern(kBytes, 5), ends[1].memory.begin());
  std::vector<std::byte> got(kBytes);
  bool lost = false;
  ends[0].on_lost = [&] {
    lost = true;
    if (ends[0].completed.contains(2)) {
      EXPECT_TRUE(got == net_pattern(kBytes, 5)) << "the get was quicker than the loss";
    }
    std::ranges::fill(got, std::byte{0xEE});
  };
  ends[0].engine->get(1, got, 0, 2);
  // The peer announces its end before it looks at requests.
  ends.close({1});
  ASSERT_TRUE(ends.poll_until([&] { return lost; }));
  for (int i = 0; i < 100; ++i) ends.poll();
  EXPECT_EQ(std::ranges::count(got, std::byte{0xEE}), static_cast<std::ptrdiff_t>(kBytes));
}

/// A rank that names memory outside the receiver's loses its connection, and no memory is changed.
class LoopbackRemote : public testing::TestWithParam<AtomicOp> {};
INSTANTIATE_TEST_SUITE_P(, LoopbackRemote,
                         testing::Values(AtomicOp{Kind::kAdd, 4096, 1, 0}, AtomicOp{Kind::kAdd, 4092, 1, 0},
                                         AtomicOp{Kind::kSet, 12, 1, 0}, AtomicOp{Kind::kSet, SIZE_MAX - 7, 1, 0},
                                         AtomicOp{static_cast<Kind>(3), 0, 1, 0}));

TEST_P(LoopbackRemote, AnAtomicOutsideOfTheMemoryIsRefused) {
  NetEnds ends("loopback", {.memory_bytes = 4096});
  ends.connect();
  ends[0].engine->atomic(1, 0, GetParam(), 1);
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
  EXPECT_EQ(ends[1].lost.at(0).code(), ErrorCode::kTransport);
  EXPECT_TRUE(std::ranges::all_of(ends[1].memory, [](std::byte one) { return one == std::byte{0}; }));
  EXPECT_TRUE(ends[0].completed.empty());
}

TEST(LoopbackRemoteGet, OutsideOfTheMemoryIsRefused) {
  for (const std::size_t offset : {std::size_t{4090}, std::size_t{4097}, SIZE_MAX - 3}) {
    NetEnds ends("loopback", {.memory_bytes = 4096});
    ends.connect();
    std::vector<std::byte> got(8);
    ends[0].engine->get(1, got, offset, 1);
    ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
    EXPECT_TRUE(ends[0].completed.empty());
  }
}

}  // namespace
}  // namespace ferry::test
