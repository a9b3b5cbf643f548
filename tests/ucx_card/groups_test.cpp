/// Groups of CPU ranks on different hosts whose cards fail or are late.

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
    context.expect(status.peer() == 1 - context.rank(), status.to_string());
  });
}

}  // namespace
}  // namespace ferry::test
