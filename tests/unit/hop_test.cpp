/// What ranks take from their rail peers' hands: nothing of it may be believed unseen.

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>

#include "hop/call_notice.hpp"

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

}  // namespace
}  // namespace ferry::hop
