/// Requests of a ring for a rank that accepts none at the moment: requests for other ranks pass them, and order,
/// answers and quiet stay the same.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "one_sided/lone_source.hpp"
#include "one_sided/ring_source.hpp"

namespace ferry::one_sided {
namespace {

using device::RequestOp;
using test::HostRing;
using test::LoneSource;

constexpr std::uint64_t kNumBytes = 40;

/// A request as the driver saw it.
struct Issued {
  NetworkRequest::Kind kind = NetworkRequest::Kind::kPut;
  int peer = 0;
  std::uint64_t operand = 0;
  std::vector<std::byte> bytes;
  Completion* completion = nullptr;
};

/// Issues all requests that it can, to ranks that are not stalled.
struct Network {
  std::vector<Issued> take_all(RingSource& source) {
    std::vector<Issued> all;
    const CanIssue can_issue = [this](int peer) { return !stalled.contains(peer); };
    for (const NetworkRequest* next = source.front(can_issue); next != nullptr; next = source.front(can_issue)) {
      EXPECT_TRUE(can_issue(next->peer));
      Issued one{next->kind, next->peer, next->op.operand, {}, next->completion};
      if (next->kind == NetworkRequest::Kind::kPut || next->kind == NetworkRequest::Kind::kPutSignal) {
        one.bytes.assign(next->local, next->local + next->num_bytes);
      }
      if (lost.contains(next->peer) && next->completion != nullptr) next->completion->lost(next->peer);
      source.taken();
      all.push_back(std::move(one));
    }
    return all;
  }

  std::set<int> stalled;
  std::set<int> lost;
};

/// Writes a put of staged bytes with a signal of `value`, then overwrites the slot as a later writer would.
void put_staged(HostRing& ring, RingSource& source, Network& network, std::uint32_t peer, std::uint64_t value,
                std::vector<Issued>& issued) {
  const std::uint64_t ticket = ring.take_slot();
  std::memset(ring.writer().staging(ticket), static_cast<int>(value), kNumBytes);
  ring.writer().write({.op = RequestOp::kPutSignalAdd,
                       .peer = peer,
                       .local_offset = ring.writer().staging_offset(ticket),
                       .remote_offset = 512,
                       .num_bytes = kNumBytes,
                       .value = value,
                       .signal_offset = 8},
                      ticket);
  std::ranges::move(network.take_all(source), std::back_inserter(issued));
  if (ring.writer().has_room(ticket + ring.ring().num_slots)) {
    std::memset(ring.writer().staging(ticket), 0xEE, kNumBytes);
  }
}

TEST(HeldRequests, ThoseForOtherRanksGoOnAndTheirOwnKeepTheirOrderAndBytes) {
  constexpr std::uint64_t kRounds = 20;  // many times the capacity of the ring
  LoneSource lone({.num_slots = 8, .num_ranks = 3});
  Network network;
  network.stalled = {1};
  std::vector<Issued> issued;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    ASSERT_TRUE(lone.ring.writer().has_room(lone.ring.writer().head() + 3)) << "round " << round;
    put_staged(lone.ring, *lone.source, network, 1, round, issued);
    lone.ring.post({.op = RequestOp::kPutValueSignalSet,
                    .peer = 1,
                    .remote_offset = 16,
                    .value = 100 + round,
                    .operand = round,
                    .signal_offset = 8});
    lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 0, .remote_offset = 24, .value = 1});
    put_staged(lone.ring, *lone.source, network, 2, round, issued);
    if (round == kRounds / 2) lone.ring.post({.op = RequestOp::kFence, .peer = 1});
  }
  ASSERT_EQ(issued.size(), kRounds) << "all requests for rank 2";
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    EXPECT_EQ(issued[round - 1].peer, 2);
    EXPECT_EQ(issued[round - 1].operand, round);
  }
  EXPECT_EQ(*reinterpret_cast<std::uint64_t*>(lone.heap.data() + 24), kRounds);

  network.stalled.clear();
  lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 1, .remote_offset = 8, .value = 999});
  issued = network.take_all(*lone.source);
  ASSERT_EQ(issued.size(), 2 * kRounds + 2);
  EXPECT_EQ(issued.back().operand, 999U) << "behind the held requests";
  EXPECT_EQ(issued[kRounds].kind, NetworkRequest::Kind::kFence);
  issued.erase(issued.begin() + kRounds);
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    const Issued& staged = issued[2 * round - 2];
    EXPECT_EQ(staged.operand, round);
    EXPECT_EQ(staged.bytes, std::vector<std::byte>(kNumBytes, static_cast<std::byte>(round)));
    const Issued& value = issued[2 * round - 1];
    EXPECT_EQ(value.operand, 100 + round);
    std::uint64_t word = 0;
    ASSERT_EQ(value.bytes.size(), sizeof(word));
    std::memcpy(&word, value.bytes.data(), sizeof(word));
    EXPECT_EQ(word, round);
  }
}

TEST(HeldRequests, QuietWaitsForThemAndTellsOfThoseThatAreLost) {
  for (const bool lost : {false, true}) {
    LoneSource lone({.num_slots = 8, .num_ranks = 3});
    RingSource& source = *lone.source;
    const test::HostWriter writer = lone.ring.writer();
    Network network;
    network.stalled = {1};
    lone.ring.post({.op = RequestOp::kPutValue, .peer = 1, .remote_offset = 8, .value = 1});
    lone.ring.post({.op = RequestOp::kFetchAdd, .peer = 1, .wants_reply = true, .reply = 5, .remote_offset = 8});
    const std::uint64_t staged = lone.ring.ring().staging_offset + 8 * LoneSource::kSlotBytes;
    lone.ring.post(
        {.op = RequestOp::kGet, .peer = 1, .wants_reply = true, .reply = 6, .local_offset = staged, .num_bytes = 8});
    lone.ring.post({.op = RequestOp::kPutValue, .peer = 2, .remote_offset = 8, .value = 1});
    const std::uint64_t first = lone.ring.post({.op = RequestOp::kQuiet});
    lone.ring.post({.op = RequestOp::kPutValue, .peer = 2, .remote_offset = 8, .value = 2});
    const std::uint64_t second = lone.ring.post({.op = RequestOp::kQuiet});
    for (const Issued& one : network.take_all(source)) {
      EXPECT_EQ(one.peer, 2);
      if (one.completion != nullptr) one.completion->done(0);
    }
    EXPECT_EQ(source.num_taken(), second + 1);
    EXPECT_LE(writer.completed(), first) << "requests held for rank 1 are not complete";

    network.stalled.clear();
    if (lost) network.lost = {1};
    std::vector<Issued> issued = network.take_all(source);
    ASSERT_EQ(issued.size(), 4U);
    EXPECT_EQ(issued.back().kind, NetworkRequest::Kind::kFlush);
    if (!lost) {
      EXPECT_LE(writer.completed(), first) << "requests under way are not complete";
      for (const Issued& one : issued) {
        if (one.completion != nullptr) one.completion->done(7);
      }
    }
    EXPECT_GT(writer.completed(), second);
    EXPECT_EQ(writer.take_loss(), lost);
    for (const std::uint64_t reply : {std::uint64_t{5}, std::uint64_t{6}}) {
      std::uint64_t value = 0;
      EXPECT_EQ(writer.has_reply(reply, value), !lost);
      // A lost request leaves no copy under way: its staging memory may be reused.
      EXPECT_EQ(writer.is_over(reply), lost);
    }
  }
}

TEST(HeldRequests, TheRingWaitsForARankOnceThereIsNoMoreRoomForIt) {
  constexpr std::uint64_t kNumSlots = 64;
  LoneSource lone({.num_slots = kNumSlots, .num_ranks = 4, .max_held_bytes = 2048});
  RingSource& source = *lone.source;
  Network network;
  network.stalled = {1};
  for (std::uint64_t i = 0; i < kNumSlots - 2; ++i) {
    lone.ring.post(
        {.op = RequestOp::kPutValueSignalAdd, .peer = 1, .remote_offset = 16, .value = i, .signal_offset = 8});
  }
  lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 2, .remote_offset = 8, .value = 1});
  const std::uint64_t last = lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 3, .remote_offset = 8, .value = 1});
  EXPECT_TRUE(network.take_all(source).empty());
  const std::uint64_t num_held = source.num_taken();
  EXPECT_GT(num_held, 1U);
  EXPECT_LT(num_held, kNumSlots - 2);
  EXPECT_TRUE(network.take_all(source).empty());
  EXPECT_EQ(source.num_taken(), num_held);

  network.stalled.clear();
  const std::vector<Issued> issued = network.take_all(source);
  ASSERT_EQ(issued.size(), kNumSlots);
  EXPECT_EQ(source.num_taken(), last + 1);
  std::uint64_t next = 0;
  for (const Issued& one : issued) {
    if (one.peer != 1) continue;
    EXPECT_EQ(one.operand, next++);
  }
  EXPECT_EQ(next, kNumSlots - 2);
}

TEST(HeldRequests, NeitherTheyNorTheRingWaitForEachOther) {
  constexpr std::uint64_t kNumRequests = 64;
  LoneSource lone({.num_slots = kNumRequests, .num_ranks = 4});
  Network network;
  network.stalled = {1, 2};
  for (std::uint64_t i = 0; i < kNumRequests; ++i) {
    lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 1 + static_cast<std::uint32_t>(i % 2), .remote_offset = 8});
  }
  EXPECT_TRUE(network.take_all(*lone.source).empty());
  ASSERT_EQ(lone.source->num_taken(), kNumRequests);
  for (std::uint64_t i = 0; i < kNumRequests; ++i) {
    lone.ring.post({.op = RequestOp::kSignalAdd, .peer = 3, .remote_offset = 8});
  }
  network.stalled.clear();
  const std::vector<Issued> issued = network.take_all(*lone.source);
  ASSERT_EQ(issued.size(), 2 * kNumRequests);
  for (const int peer : {1, 2, 3}) {
    EXPECT_TRUE(std::any_of(issued.begin(), issued.begin() + 8, [&](const Issued& one) { return one.peer == peer; }))
        << "rank " << peer << " is among the first";
  }
}

}  // namespace
}  // namespace ferry::one_sided
