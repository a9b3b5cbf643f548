#include "fault/lost_rank.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "fault/small_exchange.hpp"
#include "node/futex.hpp"

namespace ferry::test {

void LostRankRun::run(const std::function<void(RankContext&, Group&)>& victim,
                      const std::function<void(RankContext&, std::shared_ptr<Group>)>& survivor) const {
  const std::vector<std::string> failures =
      collect_rank_failures({.kind = RankKind::kProcesses, .num_ranks = spec_.num_ranks}, [&](RankContext& context) {
        if (context.rank() != 0) close(meeting_.listen_fd);
        GroupOptions options{.backend = "cpu", .ranks_per_node = spec_.ranks_per_node};
        options.timeout_ns = kFaultTimeoutNs;
        Result<std::shared_ptr<Group>> group = Group::create(context.bootstrap(), options);
        if (!context.expect_ok(group.status(), "create")) return;
        if (context.rank() == kVictim) {
          victim(context, **group);
          context.fail("the victim survived");
        } else {
          survivor(context, std::move(*group));
          report_survivor_done(words_);
        }
      });
  close(meeting_.listen_fd);
  std::vector<std::string> expected;
  if (spec_.fate == Fate::kKilled) expected.push_back(fmt::format("rank {}: died of signal 9", kVictim));
  EXPECT_EQ(failures, expected);
}

ErrorCode LostRankRun::expected_code() const {
  return spec_.fate == Fate::kKilled ? ErrorCode::kPeerLost : ErrorCode::kTimeout;
}

void LostRankRun::expect_named(RankContext& context, const Status& status, const char* what) const {
  context.expect_code(status, expected_code(), what);
  context.expect(status.peer() == kVictim,
                 fmt::format("{}: blamed rank {}: {}", what, status.peer(), status.to_string()));
  context.expect(status.message().find(fmt::format("rank {}", kVictim)) != std::string_view::npos, "names the rank");
}

void LostRankRun::expect_interrupted(RankContext& context, const Status& status, std::int64_t begin_ns) const {
  const std::int64_t waited_ns = node::monotonic_ns() - begin_ns;
  expect_named(context, status, "the interrupted call");
  const bool names_call = status.message().find(to_string(spec_.operation)) != std::string_view::npos;
  // Ranks that notice the loss in a later call report the call of the rank that noticed it first.
  const bool noticed_later =
      several_nodes() && (spec_.operation == Operation::kCombine || spec_.operation == Operation::kLatencyCombine);
  context.expect(names_call || noticed_later, fmt::format("names the call: {}", status.to_string()));
  context.expect(waited_ns <= 2 * kFaultTimeoutNs, fmt::format("took {} ms", waited_ns / 1'000'000));
}

void LostRankRun::go_on_without_it(RankContext& context, std::shared_ptr<Group> group, const Status& later,
                                   const std::function<Status(Group&)>& exchange) const {
  expect_named(context, later, "a later call");
  context.expect_code(group->destroy(), expected_code(), "destroy returns the error and leaves");
  group.reset();

  const int new_rank = context.rank() < kVictim ? context.rank() : context.rank() - 1;
  auto bootstrap = create_tcp_bootstrap(meeting_.options(new_rank, context.num_ranks() - 1));
  if (!context.expect_ok(bootstrap.status(), "the survivors' bootstrap")) return;
  // One rank is missing, so only nodes of one rank each have equal sizes.
  Result<std::shared_ptr<Group>> second =
      Group::create(*bootstrap, {.backend = "cpu", .ranks_per_node = several_nodes() ? 1 : 0});
  if (!context.expect_ok(second.status(), "the survivors' group")) return;
  context.expect_ok(exchange(**second), "the survivors' exchange");
  context.expect_ok((*second)->destroy(), "the end");
}

}  // namespace ferry::test
