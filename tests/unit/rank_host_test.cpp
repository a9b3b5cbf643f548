/// GroupOptions::ranks_per_node = 0: ranks that share a host become a node, or all ranks report why they cannot.

#include "core/rank_host.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ferry/ferry.hpp"
#include "support/rank_runner.hpp"

namespace ferry::test {
namespace {

RankHost rank_on(char machine, std::int64_t pid, std::uint64_t network_namespace = 1) {
  RankHost rank;
  rank.process.boot_id[0] = rank.host.boot_id[0] = machine;
  rank.process.pid = pid;
  rank.host.network_namespace = network_namespace;
  return rank;
}

/// One process for each rank, on the machines of these names.
std::vector<RankHost> ranks_on(std::string_view machines) {
  std::vector<RankHost> ranks;
  for (const char machine : machines) ranks.push_back(rank_on(machine, static_cast<std::int64_t>(ranks.size())));
  return ranks;
}

std::string refusal_of(std::string_view machines) {
  const Result<int> found = find_ranks_per_node(ranks_on(machines));
  EXPECT_EQ(found.status().code(), ErrorCode::kUnsupported) << machines;
  return fmt::format("{} ({})", found.status().message(), found.status().peer());
}

TEST(FindRanksPerNode, CountsTheRanksOfEachHost) {
  for (const auto& [machines, expected] : std::initializer_list<std::pair<const char*, int>>{
           {"a", 1}, {"aaaa", 4}, {"aabb", 2}, {"abcd", 1}, {"bbbaaaccc", 3}}) {
    EXPECT_EQ(find_ranks_per_node(ranks_on(machines)).value(), expected) << machines;
  }
}

TEST(FindRanksPerNode, ContainersWithNetworksOfTheirOwnAreHosts) {
  const std::vector<RankHost> ranks{rank_on('a', 1, 1), rank_on('a', 2, 1), rank_on('a', 3, 2), rank_on('a', 4, 2)};
  EXPECT_EQ(find_ranks_per_node(ranks).value(), 2);
  // Threads of a process reach each other's memory in any network namespace.
  const std::vector<RankHost> threads{rank_on('a', 1, 1), rank_on('a', 1, 2)};
  EXPECT_EQ(find_ranks_per_node(threads).value(), 2);
}

TEST(FindRanksPerNode, SaysWhichHostHasAnotherNumberOfRanks) {
  EXPECT_NE(refusal_of("aaab").find("rank 0's host has 3 of them and rank 3's has 1;"), std::string::npos);
  EXPECT_NE(refusal_of("aabbc").find("rank 0's host has 2 of them and rank 4's has 1;"), std::string::npos);
  EXPECT_NE(refusal_of("abb").find("rank 0's host has 1 of them and rank 1's has 2;"), std::string::npos);
}

TEST(FindRanksPerNode, SaysWhichRanksOfAHostAreApart) {
  EXPECT_NE(refusal_of("abab").find("ranks 0 and 2 share a host and rank 1 runs on another;"), std::string::npos);
  EXPECT_NE(refusal_of("aabba").find("ranks 0 and 4 share a host and rank 3 runs on another;"), std::string::npos);
  EXPECT_NE(refusal_of("abcb").find("(3)"), std::string::npos);
}

TEST(DivideHosts, TakesTheLargestNodesThatCrossNoHost) {
  for (const auto& [machines, expected] : std::initializer_list<std::pair<const char*, int>>{
           {"a", 1}, {"aaaa", 4}, {"aabb", 2}, {"aaabb", 1}, {"aaaabb", 2}, {"abab", 1}, {"aabbaabb", 2}}) {
    EXPECT_EQ(divide_hosts(ranks_on(machines)), expected) << machines;
  }
}

/// The first message of each rank ends with its host and process: this bootstrap replaces them by the hosts of these
/// names.
class OnHosts final : public Bootstrap {
 public:
  OnHosts(std::shared_ptr<Bootstrap> inner, std::string_view hosts) : inner_(std::move(inner)), hosts_(hosts) {}
  /// Users of the ranks, one character each.
  void run_as(std::string_view users) { users_ = users; }
  /// Makes this rank send the message of rank 0, as a bootstrap that mixes messages up would.
  void mix_up(int rank) { liar_ = rank; }
  int rank() const override { return inner_->rank(); }
  int num_ranks() const override { return inner_->num_ranks(); }
  Result<std::vector<std::vector<std::byte>>> all_gather(std::span<const std::byte> mine,
                                                         std::int64_t timeout_ns) override {
    std::vector<std::byte> message(mine.begin(), mine.end());
    if (std::exchange(first_, false)) {
      RankHost place = rank_on(hosts_[static_cast<std::size_t>(rank())], rank());
      place.rank = rank() == liar_ ? 0 : rank();
      place.user = users_.empty() ? 0 : users_[static_cast<std::size_t>(rank())];
      std::memcpy(message.data() + message.size() - sizeof place, &place, sizeof place);
    }
    return inner_->all_gather(message, timeout_ns);
  }

 private:
  std::shared_ptr<Bootstrap> inner_;
  std::string hosts_;
  std::string users_;
  int liar_ = -1;
  bool first_ = true;
};

Result<std::shared_ptr<Group>> create_on(RankContext& context, std::string_view hosts) {
  return Group::create(std::make_shared<OnHosts>(context.bootstrap(), hosts),
                       {.backend = "cpu", .timeout_ns = 20 * kNsPerSecond, .transport = "loopback"});
}

TEST(GroupOfHosts, HasANodeForEachHost) {
  run_ranks({.num_ranks = 4}, [](RankContext& context) {
    const auto group = create_on(context, "aabb");
    if (!context.expect_ok(group.status(), "Group::create")) return;
    context.expect((*group)->topology().ranks_per_node == 2, "two ranks per node");
    context.expect((*group)->network_usage().rails.size() == 1, "one rail peer");
    context.expect_ok((*group)->destroy(), "destroy");
  });
}

TEST(GroupOfHosts, RefusesOnEveryRankWhatCannotBeNodes) {
  for (const char* hosts : {"aaab", "abab"}) {
    run_ranks({.num_ranks = 4}, [hosts](RankContext& context) {
      const Status status = create_on(context, hosts).status();
      context.expect_code(status, ErrorCode::kUnsupported, hosts);
      context.expect(status.message().find("ranks_per_node is 0") != std::string::npos, status.to_string());
    });
  }
}

TEST(GroupOfHosts, RefusesAtOnceOnEveryRankANodeOfTwoUsers) {
  run_ranks({.num_ranks = 4}, [](RankContext& context) {
    const auto bootstrap = std::make_shared<OnHosts>(context.bootstrap(), "aabb");
    bootstrap->run_as("xxxy");
    const Status status =
        Group::create(bootstrap, {.backend = "cpu", .timeout_ns = 20 * kNsPerSecond, .transport = "loopback"}).status();
    context.expect_code(status, ErrorCode::kUnsupported, "ranks 2 and 3");
    context.expect(status.message().find("rank 2 runs as user") != std::string::npos, status.to_string());
    context.expect(status.peer() == 3, "names rank 3");
  });
}

TEST(GroupOfHosts, RefusesMessagesThatAreNotInTheOrderOfRanks) {
  run_ranks({.num_ranks = 3}, [](RankContext& context) {
    const auto bootstrap = std::make_shared<OnHosts>(context.bootstrap(), "aaa");
    bootstrap->mix_up(1);
    const Status status = Group::create(bootstrap, {.backend = "cpu", .timeout_ns = 20 * kNsPerSecond}).status();
    context.expect_code(status, ErrorCode::kTransport, "rank 0's message twice");
    context.expect(status.message().find("returned the message of rank 0 at the index of rank 1") != std::string::npos,
                   status.to_string());
  });
}

}  // namespace
}  // namespace ferry::test
