/// Messages of rail peers are checked before they are used.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "rail/call_header.hpp"
#include "rail/chunk_reader.hpp"
#include "rail/rail_memory.hpp"
#include "rail/rails.hpp"

namespace ferry::rail {
namespace {

using Bytes = std::array<std::byte, sizeof(CallHeader)>;

Bytes bytes_of(const CallHeader& header) {
  Bytes bytes;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

CallHeader route_header() {
  CallHeader header;
  header.call = 7;
  header.record.fields[1] = 64;
  header.max_recv_rows = 1000;
  header.num_entries = 80;
  return header;
}

Status parse(const CallHeader& header) {
  CallHeader parsed;
  return parse_call_header(bytes_of(header), 7, &parsed);
}

TEST(CallHeader, IsReadAsItWasSent) {
  CallHeader sent = route_header();
  sent.record.set_status(Status(ErrorCode::kCapacity, "route: too much"));
  CallHeader received;
  ASSERT_TRUE(parse_call_header(bytes_of(sent), 7, &received).ok());
  EXPECT_EQ(std::memcmp(&sent, &received, sizeof(sent)), 0);
}

TEST(CallHeader, OfAnotherCallIsRefused) {
  CallHeader header = route_header();
  header.call = 9;
  EXPECT_EQ(parse(header).code(), ErrorCode::kTransport);
  EXPECT_EQ(parse(header).message(), "announced call 9, expected 7");
}

TEST(CallHeader, WithEnumeratorsThatDoNotExistIsRefused) {
  CallHeader header = route_header();
  header.record.operation = static_cast<Operation>(static_cast<int>(Operation::kDestroy) + 1);
  EXPECT_EQ(parse(header).code(), ErrorCode::kTransport);
  header = route_header();
  header.record.code = static_cast<ErrorCode>(-1);
  EXPECT_EQ(parse(header).code(), ErrorCode::kTransport);
  header.record.code = static_cast<ErrorCode>(static_cast<int>(ErrorCode::kDataCorrupt) + 1);
  EXPECT_EQ(parse(header).code(), ErrorCode::kTransport);
}

TEST(CallHeader, WithNumbersThatRouteCannotCountIsRefused) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  for (const std::int64_t number : {std::int64_t{-1}, kMost + 1, std::numeric_limits<std::int64_t>::min()}) {
    CallHeader header = route_header();
    header.max_recv_rows = number;
    EXPECT_EQ(parse(header).code(), ErrorCode::kTransport) << number;
    header = route_header();
    header.num_entries = number;
    EXPECT_EQ(parse(header).code(), ErrorCode::kTransport) << number;
  }
  CallHeader header = route_header();
  header.max_recv_rows = header.num_entries = kMost;
  EXPECT_TRUE(parse(header).ok());
}

TEST(CallHeader, HasOnlyPrintableText) {
  CallHeader header = route_header();
  header.record.set_status(Status(ErrorCode::kCapacity, "a\x1b[31m\xff\n"));
  CallHeader parsed;
  ASSERT_TRUE(parse_call_header(bytes_of(header), 7, &parsed).ok());
  EXPECT_EQ(std::string(parsed.record.message.data(), 8), "a?[31m??");
}

TEST(CallHeader, HasNoTextBeyondItsBounds) {
  CallHeader header = route_header();
  header.record.code = ErrorCode::kCapacity;
  header.record.message_bytes = kCallMessageBytes + 1;
  EXPECT_EQ(parse(header).code(), ErrorCode::kTransport);
  header.record.message_bytes = -1;
  EXPECT_EQ(parse(header).code(), ErrorCode::kTransport);
}

TEST(ErrorRecord, IsUsableWhateverWasSent) {
  ErrorRecord sent;
  sent.code = ErrorCode::kOk;
  sent.culprit = 8;
  sent.message_bytes = std::numeric_limits<std::int32_t>::max();
  sent.message.fill('\xff');
  std::array<std::byte, sizeof(sent)> bytes;
  std::memcpy(bytes.data(), &sent, sizeof(sent));
  const ErrorRecord usable = usable_error_record(bytes, 8);
  EXPECT_EQ(usable.code, ErrorCode::kTransport);
  EXPECT_EQ(usable.culprit, -1);
  EXPECT_EQ(std::string(usable.message.data(), static_cast<std::size_t>(usable.message_bytes)),
            std::string(kErrorMessageBytes, '?'));
}

/// A chunk with room for eight items of 16 bytes.
std::vector<std::byte> chunk_with(const ChunkHeader& header) {
  std::vector<std::byte> chunk(kChunkHeaderBytes + 128);
  std::memcpy(chunk.data(), &header, sizeof(header));
  return chunk;
}

constexpr ChunkHeader kGoodHeader{.chunk_idx = 5, .exchange_idx = 2, .num_items = 8, .item_bytes = 16};

TEST(ChunkReader, GivesItemsInOrderUntilAllAreUsed) {
  ChunkReader reader({.exchange_idx = 2, .num_items = 10, .item_bytes = 16});
  const std::vector<std::byte> chunk = chunk_with(kGoodHeader);
  ASSERT_TRUE(reader.open(chunk, 5).ok());
  EXPECT_EQ(reader.front().size(), 128U);
  EXPECT_FALSE(reader.pop(3));
  EXPECT_EQ(reader.front().data(), chunk.data() + kChunkHeaderBytes + 48);
  EXPECT_EQ(reader.front().size(), 80U);
  EXPECT_TRUE(reader.pop(5));
  EXPECT_TRUE(reader.front().empty());
  EXPECT_FALSE(reader.all_used());
  ChunkHeader last = kGoodHeader;
  last.chunk_idx = 6;
  last.num_items = 2;
  const std::vector<std::byte> last_chunk = chunk_with(last);
  ASSERT_TRUE(reader.open(last_chunk, 6).ok());
  EXPECT_TRUE(reader.pop(2));
  EXPECT_TRUE(reader.all_used());
}

TEST(ChunkReader, RefusesWhatWasNotAgreedOn) {
  const auto refuses = [](auto change) {
    ChunkHeader header = kGoodHeader;
    change(header);
    ChunkReader reader({.exchange_idx = 2, .num_items = 10, .item_bytes = 16});
    const std::vector<std::byte> chunk = chunk_with(header);
    return reader.open(chunk, 5).code() == ErrorCode::kTransport && reader.front().empty();
  };
  EXPECT_FALSE(refuses([](ChunkHeader& /*header*/) {}));
  EXPECT_TRUE(refuses([](ChunkHeader& header) { header.chunk_idx = 4; }));
  EXPECT_TRUE(refuses([](ChunkHeader& header) { header.exchange_idx = 1; }));
  EXPECT_TRUE(refuses([](ChunkHeader& header) { header.item_bytes = 8; }));
  EXPECT_TRUE(refuses([](ChunkHeader& header) { header.num_items = 0; }));
  EXPECT_TRUE(refuses([](ChunkHeader& header) { header.num_items = 9; })) << "more than a chunk holds";
  EXPECT_TRUE(refuses([](ChunkHeader& header) { header.num_items = 0xFFFFFFFF; }));
}

TEST(EngineVersions, ThatDifferAreRefusedWithBothRanks) {
  const std::vector<std::string_view> alike{"UCX 1.13", "UCX 1.13", "UCX 1.13"};
  EXPECT_TRUE(check_engine_versions(alike).ok());
  const std::vector<std::string_view> mixed{"UCX 1.13", "UCX 1.13", "UCX 1.22"};
  const Status status = check_engine_versions(mixed);
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
  EXPECT_EQ(status.peer(), 2);
  EXPECT_NE(status.message().find("rank 0 has UCX 1.13 and rank 2 has UCX 1.22"), std::string::npos);
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
  std::fill_n(chunk.begin(), kChunkHeaderBytes, std::byte{0xFF});
  EXPECT_EQ(reader.front().size(), 128U);
  EXPECT_FALSE(reader.pop(7));
  EXPECT_EQ(reader.front().size(), 16U);
}

}  // namespace
}  // namespace ferry::rail
