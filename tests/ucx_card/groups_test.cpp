/// Groups of CPU ranks on different hosts whose cards fail or are late.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ucx_card/hosts.hpp"
#include "ucx_card/rounds.hpp"
#include "ucx_card/variable.hpp"

namespace ferry::test {
namespace {

constexpr std::int64_t kLongNs = 30 * kNsPerSecond;
constexpr int kNumRounds = 30;

GroupOptions options_of(std::int64_t timeout_ns) {
  return {.backend = "cpu", .ranks_per_node = 1, .timeout_ns = timeout_ns, .transport = "ucx"};
}

/// Runs `body` on ranks on hosts of their own.
void run_on_hosts(int num_hosts, std::int64_t timeout_ns, const std::function<void(RankContext&, Group&)>& body) {
  run_ranks({RankKind::kThreads, num_hosts}, [&](RankContext& context) {
    enter_host(context.rank());
    auto group = Group::create(context.bootstrap(), options_of(timeout_ns));
    if (context.expect_ok(group.status(), "Group::create")) body(context, **group);
  });
}

TEST(UcxCardGroups, AreConnectedByTheirCards) {
  run_on_hosts(3, kLongNs, [](RankContext& context, Group& group) {
    const NetworkUsage usage = group.network_usage();
    context.expect(usage.rails.size() == 2, "a rail to each other host");
    for (const RailUsage& rail : usage.rails) {
      context.expect(rail.route.find("rc_mlx5") != std::string::npos, "a rail over " + rail.route);
    }
    context.expect_ok(group.destroy(), "destroy");
  });
}

/// Setting of the last context with cards that UCX was given; empty: none.
std::string configured(const char* name) {
  void* const library = dlopen(FERRY_UCX_CARD_FOLDER "/libucp.so.0", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "the card is not loaded";
  const auto look = reinterpret_cast<const char* (*)(const char*)>(dlsym(library, "ferry_ucx_card_configured"));
  const char* const value = look == nullptr ? "the card keeps no settings" : look(name);
  const std::string text = value == nullptr ? "" : value;
  dlclose(library);
  return text;
}

/// Ranks on hosts of their own, which send with these settings, and what the first one says of its network.
NetworkUsage exchange_with(const GroupOptions& options) {
  const PreparedCase prepared = exchange_between(2);
  NetworkUsage first;
  run_ranks({RankKind::kThreads, 2}, [&](RankContext& context) {
    enter_host(context.rank());
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    context.expect_ok(exchange_rounds(context, **group, prepared, 1), "an exchange");
    if (context.rank() == 0) first = (*group)->network_usage();
    context.expect_ok((*group)->destroy(), "destroy");
  });
  return first;
}

TEST(UcxCardSettings, AreGivenToTheCards) {
  GroupOptions options = options_of(kLongNs);
  options.network_service_level = 3;
  options.network_paths = 2;
  const NetworkUsage usage = exchange_with(options);
  EXPECT_EQ(configured("IB_SL"), "3");
  EXPECT_EQ(configured("IB_NUM_PATHS"), "2");
  EXPECT_EQ(configured("MAX_RMA_RAILS"), "2");
  EXPECT_EQ(usage.service_level, 3);
  EXPECT_EQ(usage.num_paths, 2);
  ASSERT_EQ(usage.rails.size(), 1U);
  EXPECT_THAT(usage.rails[0].route, testing::HasSubstr("mlx5_0:1.1"));
}

TEST(UcxCardSettings, AreUcxsOwnUnlessAskedFor) {
  const NetworkUsage usage = exchange_with(options_of(kLongNs));
  EXPECT_EQ(configured("IB_SL"), "");
  EXPECT_EQ(configured("IB_NUM_PATHS"), "");
  EXPECT_EQ(configured("MAX_RMA_RAILS"), "");
  EXPECT_EQ(usage.service_level, -1);
  EXPECT_EQ(usage.num_paths, 0);
}

TEST(UcxCardSettings, GiveWayToUcxsVariables) {
  const Variable level("UCX_IB_SL", "5");
  const Variable rails("UCX_MAX_RMA_RAILS", "4");
  GroupOptions options = options_of(kLongNs);
  options.network_service_level = 3;
  options.network_paths = 2;
  const NetworkUsage usage = exchange_with(options);
  EXPECT_EQ(configured("IB_SL"), "");
  EXPECT_EQ(configured("IB_NUM_PATHS"), "");
  EXPECT_EQ(usage.service_level, -1);
  EXPECT_EQ(usage.num_paths, 0);
}

/// Ranks of one host use its memory and the loopback interface, which have no service level and one way.
TEST(UcxCardSettings, DoNothingBetweenRanksOfAHost) {
  run_ranks({RankKind::kThreads, 2}, [](RankContext& context) {
    GroupOptions options = options_of(kLongNs);
    options.network_service_level = 3;
    options.network_paths = 2;
    auto group = Group::create(context.bootstrap(), options);
    if (!context.expect_ok(group.status(), "Group::create")) return;
    const NetworkUsage usage = (*group)->network_usage();
    context.expect(usage.service_level == -1 && usage.num_paths == 0, "no card has settings");
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

class UcxCardGroupFault : public testing::TestWithParam<const char*> {};

TEST_P(UcxCardGroupFault, IsAnErrorOfBothRanksThatNamesTheOther) {
  const CardSettings settings(std::string("seed=2,latency_ns=50000,piece_bytes=64,end=0,") + GetParam());
  const PreparedCase prepared = exchange_between(2);
  run_on_hosts(2, kLongNs, [&](RankContext& context, Group& group) {
    const Status status = exchange_rounds(context, group, prepared, kNumRounds);
    context.expect(status.code() == ErrorCode::kPeerLost || status.code() == ErrorCode::kTransport, status.to_string());
    context.expect(status.peer() == 1 - context.rank(), status.to_string());
    const Status again = exchange_rounds(context, group, prepared, 1);
    context.expect(!again.ok() && again.peer() == 1 - context.rank(), "later calls: " + again.to_string());
  });
}

INSTANTIATE_TEST_SUITE_P(, UcxCardGroupFault,
                         testing::Values("fail=flush,fail_at=1,status=3", "fail=flush,fail_at=7,status=80",
                                         "fail=flush,fail_at=7,status=3,now=1", "fail=put,fail_at=9,status=25",
                                         "fail=put,fail_at=9,status=3,now=1", "fail=message,fail_at=12,status=80",
                                         "fail=message,fail_at=12,status=3,now=1"),
                         [](const auto& instance) {
                           std::string name(instance.param);
                           for (char& letter : name) {
                             if (letter == '=' || letter == ',') letter = '_';
                           }
                           return name;
                         });

TEST(UcxCardGroups, WaitForLateWrites) {
  const CardSettings settings("write_latency_ns=100000000,piece_bytes=64");
  const PreparedCase prepared = exchange_between(3);
  run_on_hosts(3, kLongNs, [&](RankContext& context, Group& group) {
    context.expect_ok(exchange_rounds(context, group, prepared, 1), "an exchange");
    context.expect_ok(group.destroy(), "destroy");
  });
}

TEST(UcxCardGroups, WritesThatDoNotArriveEndACallAtItsDeadline) {
  const CardSettings settings("write_latency_ns=600000000000");
  const PreparedCase prepared = exchange_between(2);
  run_on_hosts(2, kNsPerSecond / 2, [&](RankContext& context, Group& group) {
    const Status status = exchange_rounds(context, group, prepared, 1);
    context.expect(status.code() == ErrorCode::kTimeout || status.code() == ErrorCode::kPeerLost, status.to_string());
    // The rank whose deadline is first reports it to the other, by a message: those arrive.
    const bool is_told = status.message().find("gave up on this rank") != std::string_view::npos;
    context.expect(status.peer() == (is_told ? context.rank() : 1 - context.rank()), status.to_string());
  });
}

}  // namespace
}  // namespace ferry::test
