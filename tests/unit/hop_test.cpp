/// What ranks take from their rail peers' hands: nothing of it may be believed unseen.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "hop/call_notice.hpp"
#include "hop/chunk_reader.hpp"
#include "plan/rail_memory.hpp"

namespace ferry::hop {
namespace {

using Bytes = std::array<std::byte, sizeof(CallNotice)>;

Bytes bytes_of(const CallNotice& notice) {
  Bytes bytes;
  std::memcpy(bytes.data(), &notice, sizeof(notice));
  return bytes;
}

CallNotice route_notice() {
  CallNotice notice;
  notice.call = 7;
  notice.record.fields[1] = 64;
  notice.max_recv_rows = 1000;
  notice.num_entries = 80;
  return notice;
}

Status parse(const CallNotice& notice) {
  CallNotice parsed;
  return parse_call_notice(bytes_of(notice), 7, &parsed);
}

TEST(CallNotice, IsReadAsItWasSaid) {
  CallNotice said = route_notice();
  said.record.set_status(Status(ErrorCode::kCapacity, "route: too much"));
  CallNotice heard;
  ASSERT_TRUE(parse_call_notice(bytes_of(said), 7, &heard).ok());
  EXPECT_EQ(std::memcmp(&said, &heard, sizeof(said)), 0);
}

TEST(CallNotice, OfAnotherCallIsRefused) {
  CallNotice notice = route_notice();
  notice.call = 9;
  EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport);
  EXPECT_EQ(parse(notice).message(), "announced call 9, expected 7");
}

TEST(CallNotice, WithEnumeratorsThatDoNotExistIsRefused) {
  CallNotice notice = route_notice();
  notice.record.operation = static_cast<Operation>(4);
  EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport);
  notice = route_notice();
  notice.record.code = static_cast<ErrorCode>(-1);
  EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport);
  notice.record.code = static_cast<ErrorCode>(10);
  EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport);
}

TEST(CallNotice, WithNumbersThatRouteCannotCountIsRefused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t number : {std::int64_t{-1}, kMost + 1, std::numeric_limits<std::int64_t>::min()}) {
    CallNotice notice = route_notice();
    notice.max_recv_rows = number;
    EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport) << number;
    notice = route_notice();
    notice.num_entries = number;
    EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport) << number;
  }
  CallNotice notice = route_notice();
  notice.max_recv_rows = notice.num_entries = kMost;
  EXPECT_TRUE(parse(notice).ok());
}

TEST(CallNotice, SaysNothingThatCannotBeShown) {
  CallNotice notice = route_notice();
  notice.record.set_status(Status(ErrorCode::kCapacity, "a\x1b[31m\xff\n"));
  CallNotice parsed;
  ASSERT_TRUE(parse_call_notice(bytes_of(notice), 7, &parsed).ok());
  EXPECT_EQ(std::string(parsed.record.message.data(), 8), "a?[31m??");
}

TEST(CallNotice, SaysNothingBeyondItsRoom) {
  CallNotice notice = route_notice();
  notice.record.code = ErrorCode::kCapacity;
  notice.record.message_bytes = kCallMessageBytes + 1;
  EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport);
  notice.record.message_bytes = -1;
  EXPECT_EQ(parse(notice).code(), ErrorCode::kTransport);
}

TEST(Verdict, IsUsableWhateverItSays) {
  node::Verdict said;
  said.code = ErrorCode::kOk;
  said.culprit = 8;
  said.message_bytes = std::numeric_limits<std::int32_t>::max();
  said.message.fill('\xff');
  std::array<std::byte, sizeof(said)> bytes;
  std::memcpy(bytes.data(), &said, sizeof(said));
  const node::Verdict usable = usable_verdict(bytes, 8);
  EXPECT_EQ(usable.code, ErrorCode::kTransport);
  EXPECT_EQ(usable.culprit, -1);
  EXPECT_EQ(std::string(usable.message.data(), static_cast<std::size_t>(usable.message_bytes)),
            std::string(node::kVerdictMessageBytes, '?'));
}

/// A chunk with room for eight items of 16 bytes.
std::vector<std::byte> chunk_with(const plan::ChunkHeader& header) {
  std::vector<std::byte> chunk(plan::kChunkHeaderBytes + 128);
  std::memcpy(chunk.data(), &header, sizeof(header));
  return chunk;
}

constexpr plan::ChunkHeader kGoodHeader{.chunk_idx = 5, .exchange_idx = 2, .num_items = 8, .item_bytes = 16};

TEST(ChunkReader, GivesItemsInOrderUntilAllAreUsed) {
  ChunkReader reader({.exchange_idx = 2, .num_items = 10, .item_bytes = 16});
  const std::vector<std::byte> chunk = chunk_with(kGoodHeader);
  ASSERT_TRUE(reader.open(chunk, 5).ok());
  EXPECT_EQ(reader.front().size(), 128U);
  EXPECT_FALSE(reader.pop(3));
  EXPECT_EQ(reader.front().data(), chunk.data() + plan::kChunkHeaderBytes + 48);
  EXPECT_EQ(reader.front().size(), 80U);
  EXPECT_TRUE(reader.pop(5));
  EXPECT_TRUE(reader.front().empty());
  EXPECT_FALSE(reader.all_used());
  plan::ChunkHeader last = kGoodHeader;
  last.chunk_idx = 6;
  last.num_items = 2;
  const std::vector<std::byte> last_chunk = chunk_with(last);
  ASSERT_TRUE(reader.open(last_chunk, 6).ok());
  EXPECT_TRUE(reader.pop(2));
  EXPECT_TRUE(reader.all_used());
}

TEST(ChunkReader, RefusesWhatWasNotAgreedOn) {
  const auto refuses = [](auto change) {
    plan::ChunkHeader header = kGoodHeader;
    change(header);
    ChunkReader reader({.exchange_idx = 2, .num_items = 10, .item_bytes = 16});
    const std::vector<std::byte> chunk = chunk_with(header);
    return reader.open(chunk, 5).code() == ErrorCode::kTransport && reader.front().empty();
  };
  EXPECT_FALSE(refuses([](plan::ChunkHeader& /*header*/) {}));
  EXPECT_TRUE(refuses([](plan::ChunkHeader& header) { header.chunk_idx = 4; }));
  EXPECT_TRUE(refuses([](plan::ChunkHeader& header) { header.exchange_idx = 1; }));
  EXPECT_TRUE(refuses([](plan::ChunkHeader& header) { header.item_bytes = 8; }));
  EXPECT_TRUE(refuses([](plan::ChunkHeader& header) { header.num_items = 0; }));
  EXPECT_TRUE(refuses([](plan::ChunkHeader& header) { header.num_items = 9; })) << "more than a chunk holds";
  EXPECT_TRUE(refuses([](plan::ChunkHeader& header) { header.num_items = 0xFFFFFFFF; }));
}

TEST(ChunkReader, RefusesMoreItemsThanAreLeft) {
  ChunkReader reader({.exchange_idx = 2, .num_items = 7, .item_bytes = 16});
  const std::vector<std::byte> chunk = chunk_with(kGoodHeader);
  EXPECT_EQ(reader.open(chunk, 5).code(), ErrorCode::kTransport);
}

TEST(ChunkReader, AHeaderThatChangesLaterChangesNothing) {
  ChunkReader reader({.exchange_idx = 2, .num_items = 10, .item_bytes = 16});
  std::vector<std::byte> chunk = chunk_with(kGoodHeader);
  ASSERT_TRUE(reader.open(chunk, 5).ok());
  std::fill_n(chunk.begin(), plan::kChunkHeaderBytes, std::byte{0xFF});
  EXPECT_EQ(reader.front().size(), 128U);
  EXPECT_FALSE(reader.pop(7));
  EXPECT_EQ(reader.front().size(), 16U);
}

}  // namespace
}  // namespace ferry::hop
