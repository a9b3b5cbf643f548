/// GroupOptions::num_reserved_sms and the variable in its place.

#include <gtest/gtest.h>

#include <cstdlib>

#include "ferry/ferry.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

constexpr const char* kVariable = "FERRY_RESERVED_SMS";

Status create_alone(int num_reserved_sms) {
  Status status;
  run_ranks({.num_ranks = 1}, [&](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.num_reserved_sms = num_reserved_sms;
    status = Group::create(context.bootstrap(), options).status();
  });
  return status;
}

TEST(ReservedSms, MayDifferByRank) {
  run_ranks({.num_ranks = 2}, [](RankContext& context) {
    GroupOptions options{.backend = "cpu"};
    options.num_reserved_sms = context.rank() * 16;
    context.expect_ok(Group::create(context.bootstrap(), options).status(), "different numbers");
  });
}

TEST(ReservedSms, AreRefusedWhereTheyAreNoNumber) {
  const Status negative = create_alone(-2);
  EXPECT_EQ(negative.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(negative.message().find("num_reserved_sms is -2"), std::string::npos) << negative.to_string();
  for (const char* text : {"many", "-1", "3x", "99999999999"}) {
    ASSERT_EQ(setenv(kVariable, text, 1), 0);
    const Status refused = create_alone(kDefaultReservedSms);
    EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument) << text;
    EXPECT_NE(refused.message().find(kVariable), std::string::npos) << refused.to_string();
    EXPECT_TRUE(create_alone(8).ok()) << "an option replaces the variable";
  }
  ASSERT_EQ(setenv(kVariable, "12", 1), 0);
  EXPECT_TRUE(create_alone(kDefaultReservedSms).ok());
  unsetenv(kVariable);
}

}  // namespace
}  // namespace ferry::test
