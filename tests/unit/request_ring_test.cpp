/// Ring of requests from kernels to the proxy. Threads stand in for the kernels.

#include "ferry/device/proxy_ring.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "support/host_ring.hpp"

namespace ferry::one_sided {
namespace {

using device::Request;
using device::RequestOp;

constexpr std::uint64_t kLocalBytes = 8192;
constexpr std::uint64_t kRemoteBytes = 4096;
constexpr std::int64_t kForeverNs = std::int64_t{600} * 1'000'000'000;

class RequestRingTest : public testing::Test {
 protected:
  RequestReader& reader(std::int64_t timeout_ns = kForeverNs) {
    limits_.timeout_ns = timeout_ns;
    reader_ = std::make_unique<RequestReader>(host_.memory(), limits_);
    taken_.clear();
    return *reader_;
  }
  /// Takes all requests in the ring. Returns true if there was one.
  bool take() {
    bool any = false;
    for (const Request* next = reader_->front(); next != nullptr; next = reader_->front(), any = true) {
      taken_.push_back(*next);
      reader_->pop();
    }
    return any;
  }
  /// Writes one request, which must have room.
  std::uint64_t write(const Request& request) {
    const std::uint64_t ticket = writer_.take_ticket();
    EXPECT_TRUE(writer_.has_room(ticket));
    writer_.write(request, ticket);
    return ticket;
  }

  test::HostRing host_{8, 16, kRemoteBytes};
  test::HostWriter writer_ = host_.writer();
  RequestLimits limits_{.num_peers = 3, .local_bytes = kLocalBytes, .remote_bytes = kRemoteBytes};
  std::vector<Request> taken_;
  std::unique_ptr<RequestReader> reader_;
};

TEST_F(RequestRingTest, EveryFieldArrives) {
  reader();
  const Request request{.op = RequestOp::kCompareSwap,
                        .peer = 2,
                        .wants_reply = true,
                        .reply = 0xFEDCBA98,
                        .local_offset = 24,
                        .remote_offset = 4088,
                        .num_bytes = 1 << 20,
                        .value = 0xFFFF'FFFF'0000'0001,
                        .operand = 0x8000'0000'0000'0000,
                        .signal_offset = 64};
  write(request);
  EXPECT_TRUE(take());
  ASSERT_EQ(taken_.size(), 1U);
  const Request& seen = taken_[0];
  EXPECT_EQ(seen.op, request.op);
  EXPECT_EQ(seen.peer, request.peer);
  EXPECT_EQ(seen.wants_reply, request.wants_reply);
  EXPECT_EQ(seen.reply, request.reply);
  EXPECT_EQ(seen.local_offset, request.local_offset);
  EXPECT_EQ(seen.remote_offset, request.remote_offset);
  EXPECT_EQ(seen.num_bytes, request.num_bytes);
  EXPECT_EQ(seen.value, request.value);
  EXPECT_EQ(seen.operand, request.operand);
  EXPECT_EQ(seen.signal_offset, request.signal_offset);
}

TEST_F(RequestRingTest, TheSizeOfAWordArrives) {
  reader();
  constexpr std::uint64_t kLargest = UINT32_MAX;
  write({.op = RequestOp::kFetchXor, .wants_reply = true, .reply = 0xFFFF'FFFF, .remote_offset = 8, .value = kLargest});
  write({.op = RequestOp::kCompareSwap,
         .is_narrow = true,
         .remote_offset = kRemoteBytes - 4,
         .value = kLargest,
         .operand = kLargest});
  EXPECT_TRUE(take());
  ASSERT_EQ(taken_.size(), 2U);
  EXPECT_FALSE(taken_[0].is_narrow);
  EXPECT_EQ(taken_[0].reply, 0xFFFF'FFFF);
  EXPECT_TRUE(taken_[1].is_narrow);
  EXPECT_FALSE(taken_[1].wants_reply);
  EXPECT_EQ(taken_[1].reply, 0U);
}

TEST_F(RequestRingTest, TwoWritersPassEachOtherRoundTheRingManyTimes) {
  constexpr std::uint64_t kNumRequests = 20'000;
  RequestReader& reader = this->reader(10 * kNsPerSecond);  // finds a lost request
  std::vector<std::thread> writers;
  for (std::uint64_t id = 0; id < 2; ++id) {
    writers.emplace_back([this, id] {
      for (std::uint64_t i = 0; i < kNumRequests; ++i) {
        const std::uint64_t ticket = writer_.take_ticket();
        while (!writer_.has_room(ticket) && !writer_.has_failed()) std::this_thread::yield();
        writer_.write({.op = RequestOp::kPutValue, .peer = static_cast<std::uint32_t>(id), .value = i}, ticket);
      }
    });
  }
  while (taken_.size() < 2 * kNumRequests && reader.status().ok()) {
    if (!take()) std::this_thread::yield();
  }
  for (std::thread& writer : writers) writer.join();
  ASSERT_TRUE(reader.status().ok()) << reader.status().message();
  std::array<std::uint64_t, 2> next{};
  for (const Request& request : taken_) EXPECT_EQ(request.value, next[request.peer]++);
  EXPECT_EQ(next, (std::array<std::uint64_t, 2>{kNumRequests, kNumRequests}));
  reader.complete(reader.num_taken());
  EXPECT_EQ(writer_.completed(), writer_.head());
}

TEST_F(RequestRingTest, WordsOfARequestMayArriveInAnyOrder) {
  reader();
  for (std::uint64_t lap = 0; lap < 3 * host_.ring().num_slots; ++lap) {
    const std::uint64_t ticket = writer_.take_ticket();
    for (std::uint32_t i = device::kRequestWords; i-- > 0;) {
      EXPECT_FALSE(take());
      writer_.write_word({.op = RequestOp::kPutValue, .value = lap}, ticket, i);
    }
    EXPECT_TRUE(take());
    EXPECT_EQ(taken_.back().value, lap);
  }
}

TEST_F(RequestRingTest, AFullRingHoldsWritersBack) {
  reader();
  for (std::uint64_t i = 0; i < host_.ring().num_slots; ++i) write({.op = RequestOp::kPutValue, .value = i});
  const std::uint64_t ticket = writer_.take_ticket();
  EXPECT_FALSE(writer_.has_room(ticket));
  EXPECT_TRUE(take());
  EXPECT_TRUE(writer_.has_room(ticket));
  writer_.write({.op = RequestOp::kPutValue, .value = 100}, ticket);
  EXPECT_TRUE(take());
  EXPECT_EQ(taken_.size(), host_.ring().num_slots + 1);
  EXPECT_EQ(taken_.back().value, 100U);
}

TEST_F(RequestRingTest, AWriterThatStopsInTheMiddleIsAnError) {
  RequestReader& reader = this->reader(0);
  write({.op = RequestOp::kPutValue});
  const std::uint64_t ticket = writer_.take_ticket();
  for (std::uint32_t i = 0; i < device::kRequestWords / 2; ++i) {
    writer_.write_word({.op = RequestOp::kPutValue}, ticket, i);
  }
  while (reader.status().ok()) take();
  EXPECT_EQ(reader.status().code(), ErrorCode::kTimeout);
  EXPECT_NE(reader.status().message().find("request 1:"), std::string_view::npos) << reader.status().message();
  EXPECT_TRUE(writer_.has_failed());
  EXPECT_EQ(taken_.size(), 1U);
}

TEST_F(RequestRingTest, ATicketThatIsNeverUsedIsAnErrorOnceALaterOneIs) {
  RequestReader& reader = this->reader(0);
  writer_.take_ticket();
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(take());
  EXPECT_TRUE(reader.status().ok()) << "a kernel may use its ticket later";
  write({.op = RequestOp::kPutValue});
  while (reader.status().ok()) take();
  EXPECT_EQ(reader.status().code(), ErrorCode::kTimeout);
  EXPECT_TRUE(taken_.empty());
}

TEST_F(RequestRingTest, RequestsOutsideOfMemoryAreNotExecuted) {
  const std::uint64_t huge = (std::uint64_t{1} << 63) - 8;
  const std::vector<Request> bad = {
      {.op = static_cast<RequestOp>(0)},
      {.op = static_cast<RequestOp>(device::kLastRequestOp + 1)},
      {.op = RequestOp::kPut, .peer = 3},
      {.op = RequestOp::kPut, .local_offset = kLocalBytes - 8, .num_bytes = 16},
      // Symmetric memory and staging memory are separate.
      {.op = RequestOp::kPut, .local_offset = kRemoteBytes - 8, .num_bytes = 16},
      {.op = RequestOp::kGet, .local_offset = kRemoteBytes - 8, .num_bytes = 9},
      {.op = RequestOp::kPut, .remote_offset = kRemoteBytes - 8, .num_bytes = 16},
      {.op = RequestOp::kPut, .remote_offset = huge, .num_bytes = huge},
      {.op = RequestOp::kGet, .remote_offset = kRemoteBytes + 1},
      {.op = RequestOp::kPutValue, .remote_offset = kRemoteBytes},
      {.op = RequestOp::kSignalAdd, .remote_offset = kRemoteBytes - 4},
      {.op = RequestOp::kFetchAdd, .remote_offset = 4},
      {.op = RequestOp::kCompareSwap, .remote_offset = huge},
      {.op = RequestOp::kPutSignalSet, .signal_offset = kRemoteBytes},
      {.op = RequestOp::kPutSignalAdd, .signal_offset = 12},
      {.op = RequestOp::kPutValueSignalSet, .remote_offset = kRemoteBytes},
      {.op = RequestOp::kPutValueSignalAdd, .remote_offset = 12},
      {.op = RequestOp::kPutValueSignalSet, .signal_offset = kRemoteBytes - 4},
      {.op = RequestOp::kPutValueSignalAdd, .signal_offset = huge},
      {.op = RequestOp::kFence, .peer = 3},
      {.op = RequestOp::kQuietPeer, .peer = 3},
      {.op = RequestOp::kSwap, .remote_offset = 4},
      {.op = RequestOp::kFetchXor, .remote_offset = kRemoteBytes},
      {.op = RequestOp::kFetchOr, .is_narrow = true, .remote_offset = 2},
      {.op = RequestOp::kFetchAnd, .is_narrow = true, .remote_offset = kRemoteBytes},
      {.op = RequestOp::kFetchAdd, .is_narrow = true, .value = std::uint64_t{1} << 32},
      {.op = RequestOp::kCompareSwap, .is_narrow = true, .operand = std::uint64_t{1} << 32},
      {.op = RequestOp::kPutValue, .is_narrow = true},
      {.op = RequestOp::kPutSignalAdd, .is_narrow = true},
  };
  for (std::size_t i = 0; i < bad.size(); ++i) {
    host_.reset();
    RequestReader& reader = this->reader();
    write(bad[i]);
    take();
    EXPECT_EQ(reader.status().code(), ErrorCode::kInvalidArgument) << "case " << i;
    EXPECT_TRUE(taken_.empty()) << "case " << i;
    EXPECT_TRUE(writer_.has_failed());
  }
}

TEST_F(RequestRingTest, AnswersReachWhoAskedAndRepliesAreUsedInTurn) {
  RequestReader& reader = this->reader();
  for (std::uint64_t i = 0; i < 3ULL * device::kNumReplies; ++i) {
    const std::uint64_t place = writer_.next_place();
    EXPECT_EQ(place, i);
    std::uint64_t reply = 0;
    std::uint64_t other = 0;
    ASSERT_TRUE(writer_.try_take_reply(place, reply));
    EXPECT_FALSE(writer_.try_take_reply(place + device::kNumReplies, other)) << "before the answer has been read";
    std::uint64_t value = 0;
    EXPECT_FALSE(writer_.has_reply(reply, value));
    const std::uint64_t sent = 0x8123'4567'89AB'CDEF + i;
    reader.answer(static_cast<std::uint32_t>(reply), sent);
    EXPECT_TRUE(writer_.has_reply(reply, value));
    EXPECT_EQ(value, sent);
    writer_.give_reply(reply);
  }
}

TEST_F(RequestRingTest, LossesAreFoundOnceAndByWhoAsked) {
  RequestReader& reader = this->reader();
  EXPECT_FALSE(writer_.take_loss());
  reader.lose();
  EXPECT_TRUE(writer_.take_loss());
  EXPECT_FALSE(writer_.take_loss());
  reader.lose();
  EXPECT_TRUE(writer_.take_loss());
  std::uint64_t reply = 0;
  ASSERT_TRUE(writer_.try_take_reply(writer_.next_place(), reply));
  EXPECT_FALSE(writer_.is_lost(reply));
  reader.lose_reply(static_cast<std::uint32_t>(reply), false);
  EXPECT_TRUE(writer_.is_lost(reply));
  EXPECT_FALSE(writer_.is_lost(reply + device::kNumReplies));
}

TEST_F(RequestRingTest, APlaceThatWasLeftIsFreeWhenItsAnswerHasComeAndNotBefore) {
  RequestReader& reader = this->reader();
  std::uint64_t left = 0;
  std::uint64_t reply = 0;
  ASSERT_TRUE(writer_.try_take_reply(5, left));
  writer_.leave_reply(left);
  EXPECT_FALSE(writer_.try_take_reply(5, reply)) << "the next user would get the answer";
  reader.answer(static_cast<std::uint32_t>(left), 77);
  ASSERT_TRUE(writer_.try_take_reply(5, reply));
  EXPECT_NE(reply, left);
  std::uint64_t value = 0;
  EXPECT_FALSE(writer_.has_reply(reply, value)) << "another request's answer";
  reader.answer(static_cast<std::uint32_t>(reply), 78);
  EXPECT_TRUE(writer_.has_reply(reply, value));
  EXPECT_EQ(value, 78U);
  writer_.leave_reply(reply);
  ASSERT_TRUE(writer_.try_take_reply(5, reply)) << "the answer arrived before the place was left";
  writer_.leave_reply(reply);
  reader.lose_reply(static_cast<std::uint32_t>(reply), false);
  ASSERT_TRUE(writer_.try_take_reply(5, reply)) << "the answer will never arrive";
  EXPECT_FALSE(writer_.is_lost(reply));
  reader.lose_reply(static_cast<std::uint32_t>(reply), true);
  EXPECT_TRUE(writer_.is_lost(reply)) << "a waiting kernel can stop";
  writer_.leave_reply(reply);
  EXPECT_FALSE(writer_.try_take_reply(5, reply)) << "staging memory of the request may still be written";
}

TEST_F(RequestRingTest, APlaceIsTakenInOneStepOnlyIfItIsFree) {
  RequestReader& reader = this->reader();
  std::uint64_t reply = 0;
  std::uint64_t other = 0;
  ASSERT_TRUE(writer_.try_take_free_reply(5 + device::kNumReplies, reply)) << "places are counted modulo their number";
  EXPECT_EQ(reply, 5U);
  EXPECT_FALSE(writer_.try_take_free_reply(5, other));
  EXPECT_FALSE(writer_.try_take_reply(5, other)) << "trying changes nothing";
  reader.answer(static_cast<std::uint32_t>(reply), 77);
  EXPECT_FALSE(writer_.try_take_free_reply(5, other)) << "the answer has not been read";
  std::uint64_t value = 0;
  ASSERT_TRUE(writer_.has_reply(reply, value));
  writer_.give_found_reply(reply);
  ASSERT_TRUE(writer_.try_take_free_reply(5, other));
  EXPECT_EQ(other, reply + device::kNumReplies);
  EXPECT_FALSE(writer_.has_reply(other, value)) << "another request's answer";
  writer_.leave_reply(other);
  EXPECT_FALSE(writer_.try_take_free_reply(5, reply));
  reader.answer(static_cast<std::uint32_t>(other), 78);
  ASSERT_TRUE(writer_.try_take_reply(5, reply)) << "the failed attempts changed nothing";
  EXPECT_EQ(reply, other + device::kNumReplies);
}

}  // namespace
}  // namespace ferry::one_sided
