/// What ranks report when their calls differ.

#include "core/agreement.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <string>
#include <vector>

#include "core/group_options.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry {
namespace {

Status check(const std::vector<CallRecord>& records) {
  std::vector<const CallRecord*> pointers;
  for (const CallRecord& record : records) pointers.push_back(&record);
  return check_agreement(pointers);
}

CallRecord dispatch_of(std::int64_t row_bytes) {
  CallRecord record;
  record.operation = Operation::kDispatch;
  record.fields[1] = row_bytes;
  return record;
}

TEST(Agreement, EqualCallsAgree) { EXPECT_TRUE(check({dispatch_of(64), dispatch_of(64), dispatch_of(64)}).ok()); }

TEST(Agreement, ADifferenceNamesBothRanksAndBothValues) {
  const Status status = check({dispatch_of(64), dispatch_of(64), dispatch_of(80)});
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.peer(), 2);
  EXPECT_EQ(
      status.message(),
      "dispatch: ranks disagree on row bytes of x: rank 0 has 64, rank 2 has 80; it must be the same on every rank");
}

TEST(Agreement, DifferentCallsAreNamed) {
  CallRecord combine;
  combine.operation = Operation::kCombine;
  const Status status = check({dispatch_of(64), combine});
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(status.message().find("rank 0 called dispatch, rank 1 called combine"), std::string_view::npos)
      << status.to_string();
}

TEST(Agreement, ARanksOwnErrorComesFirstAndWhole) {
  CallRecord failed = dispatch_of(80);
  failed.set_status(Status(ErrorCode::kCapacity, "dispatch: too much"));
  const Status status = check({dispatch_of(64), failed});
  EXPECT_EQ(status.code(), ErrorCode::kCapacity);
  EXPECT_EQ(status.message(), "rank 1: dispatch: too much");
}

TEST(Agreement, LongMessagesAreCutNotOverrun) {
  CallRecord failed = dispatch_of(80);
  failed.set_status(Status(ErrorCode::kInvalidArgument, std::string(10 * kCallMessageBytes, 'x')));
  const Status status = check({failed});
  EXPECT_EQ(status.message().size(), kCallMessageBytes + std::string_view("rank 0: ").size());
}

/// Gathers the messages that a test gives for two ranks.
class FakeBootstrap final : public Bootstrap {
 public:
  explicit FakeBootstrap(std::vector<std::byte> theirs) : theirs_(std::move(theirs)) {}
  int rank() const override { return 0; }
  int num_ranks() const override { return 2; }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t /*timeout_ns*/) override {
    return std::vector<std::vector<std::byte>>{{mine.begin(), mine.end()}, theirs_};
  }

 private:
  std::vector<std::byte> theirs_;
};

TEST(GatherOrFail, AFailureOfAnotherRankHasACodeAndARankThatExist) {
  for (const std::int32_t number : {-1, 10, std::numeric_limits<std::int32_t>::max()}) {
    const std::array<std::int32_t, 2> code_and_peer{number, number};
    const auto bytes = std::as_bytes(std::span(code_and_peer));
    FakeBootstrap bootstrap({bytes.begin(), bytes.end()});
    const Status status = gather_or_fail(bootstrap, Status(), {}, kNsPerSecond).status();
    EXPECT_EQ(status.code(), ErrorCode::kTransport) << number;
    EXPECT_EQ(status.peer(), 1) << number;
  }
}

}  // namespace
}  // namespace ferry
