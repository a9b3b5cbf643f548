/// Errors that ranks report when their calls differ.

#include "core/agreement.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "core/create_together.hpp"
#include "core/placement_digest.hpp"
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

CallRecord route_of(const std::vector<std::int32_t>& expert_to_rank) {
  CallRecord record;
  record.operation = Operation::kRoute;
  record.fields[1] = static_cast<std::int64_t>(expert_to_rank.size());
  record.fields[field_names(Operation::kRoute).size() - 1] = hash_placement(expert_to_rank);
  record.message_bytes = static_cast<std::int32_t>(
      write_placement_digest(expert_to_rank, std::span(record.message).first<kPlacementDigestBytes>()));
  return record;
}

TEST(Agreement, ADifferenceInPlacementNamesTheFirstExpert) {
  std::vector<std::int32_t> owners(static_cast<std::size_t>(kMaxListedExperts), 2);
  const CallRecord same = route_of(owners);
  EXPECT_TRUE(check({same, same}).ok());
  owners[17] = 32766;
  owners[18] = 0;
  const Status status = check({same, same, route_of(owners)});
  EXPECT_EQ(status.peer(), 2);
  EXPECT_EQ(status.message(),
            "route: ranks disagree on expert_to_rank[17]: rank 0 has 2, rank 2 has 32766; it must be the same on every "
            "rank");
}

TEST(Agreement, ADifferenceInALargePlacementNamesAFewExperts) {
  for (const std::size_t num_experts : {321U, 1000U, 4096U, 1U << 20}) {
    std::vector<std::int32_t> owners(num_experts, 2);
    const CallRecord same = route_of(owners);
    owners.back() = 3;
    const Status status = check({same, route_of(owners)});
    const std::string text(status.message());
    int first = 0;
    int last = 0;
    const std::size_t at = text.find("an expert from ");
    ASSERT_NE(at, std::string::npos) << text;
    ASSERT_EQ(std::sscanf(text.c_str() + at, "an expert from %d to %d", &first, &last), 2) << text;
    EXPECT_EQ(last, static_cast<int>(num_experts) - 1) << text;
    EXPECT_LE(last - first, static_cast<int>(num_experts) / 160) << text;
    EXPECT_EQ(status.peer(), 1);
  }
}

TEST(Agreement, ADifferenceInPlacementWithoutDetailsIsStillOne) {
  CallRecord one = route_of({0, 1});
  CallRecord other = route_of({1, 0});
  other.message_bytes = 3;
  EXPECT_NE(check({one, other}).message().find("rank 0 and rank 1 have different maps"), std::string_view::npos);
  // Values that a faulty peer may send.
  for (const std::int64_t num_experts : {std::numeric_limits<std::int64_t>::max(), std::int64_t{-1}}) {
    one.fields[1] = other.fields[1] = num_experts;
    EXPECT_EQ(check({one, other}).peer(), 1);
  }
}

CallRecord route_of_homes(const HomeMaps& maps) {
  CallRecord record;
  record.operation = Operation::kRoute;
  record.fields[2] = static_cast<std::int64_t>(maps.physical_to_rank.size());
  record.fields[field_names(Operation::kRoute).size() - 1] = hash_homes(maps);
  record.message_bytes =
      static_cast<std::int32_t>(write_homes_digest(maps, std::span(record.message).first<kPlacementDigestBytes>()));
  return record;
}

TEST(Agreement, ADifferenceInHomesNamesTheFirstOfThem) {
  for (const std::size_t num_physical : {2U, 159U, 160U, 318U, 319U, 5000U}) {
    std::vector<std::int32_t> logical(num_physical, 1);
    std::vector<std::int32_t> ranks(num_physical, 0);
    for (std::size_t i = num_physical / 2; i < num_physical; ++i) ranks[i] = 1;  // the default for two ranks
    const CallRecord same = route_of_homes({logical, ranks, 2});
    EXPECT_TRUE(check({same, same}).ok());
    logical.back() = 7;
    const std::string other_logical(check({same, route_of_homes({logical, ranks, 2})}).message());
    logical.back() = 1;
    ranks.back() = 0;
    const std::string other_rank(check({same, route_of_homes({logical, ranks, 2})}).message());
    const bool both_listed = num_physical <= 159;
    const std::string last = "[" + std::to_string(num_physical - 1) + "]";
    if (num_physical <= 318) {
      EXPECT_NE(other_logical.find("physical_to_logical" + last + ": rank 0 has 1, rank 1 has 7"), std::string::npos)
          << other_logical;
    } else {
      EXPECT_NE(other_logical.find("to " + std::to_string(num_physical - 1)), std::string::npos) << other_logical;
    }
    if (both_listed) {
      EXPECT_NE(other_rank.find("physical_to_rank" + last + ": rank 0 has 1, rank 1 has 0"), std::string::npos)
          << other_rank;
    } else {
      EXPECT_NE(other_rank.find("placement: "), std::string::npos) << other_rank;
    }
  }
}

/// Returns the messages of two ranks, the second given by the test.
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
  constexpr auto kNoCode = static_cast<std::int32_t>(ErrorCode::kDataCorrupt) + 1;
  for (const std::int32_t number : {-1, kNoCode, std::numeric_limits<std::int32_t>::max()}) {
    const std::array<std::int32_t, 2> code_and_peer{number, number};
    const auto bytes = std::as_bytes(std::span(code_and_peer));
    FakeBootstrap bootstrap({bytes.begin(), bytes.end()});
    const Status status = gather_or_fail(bootstrap, Status(), {}, kNsPerSecond).status();
    EXPECT_EQ(status.code(), ErrorCode::kTransport) << number;
    EXPECT_EQ(status.peer(), 1) << number;
  }
}

TEST(GatherOrFail, ARankThatFailedExplainsMoreThanOneThatWaited) {
  const std::int32_t code = static_cast<std::int32_t>(ErrorCode::kSystem);
  const std::array<std::int32_t, 2> code_and_peer{code, -1};
  const auto bytes = std::as_bytes(std::span(code_and_peer));
  FakeBootstrap bootstrap({bytes.begin(), bytes.end()});
  const Status waited(ErrorCode::kTimeout, "no rank came", 1);
  const Status status = gather_or_fail(bootstrap, waited, {}, kNsPerSecond).status();
  EXPECT_EQ(status.code(), ErrorCode::kSystem);
  EXPECT_EQ(status.peer(), 1);
}

}  // namespace
}  // namespace ferry
