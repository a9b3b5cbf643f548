/// Groups of ranks that may open only a few file descriptors: either the group forms, or all ranks learn at once which
/// rank has too few. No rank waits for its deadline.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "support/bootstrap_ranks.hpp"
#include "support/descriptors.hpp"

namespace ferry::test {
namespace {

/// Long enough that a rank waiting for it would exceed the test's own time limit.
constexpr std::int64_t kTimeoutNs = 600 * kNsPerSecond;
constexpr int kNumRanks = 4;

/// Runs `body(rank)` in one process for each rank; returns the statuses by rank.
std::vector<Status> run_processes(const Meeting& meeting, const std::function<Status(int)>& body) {
  std::vector<std::unique_ptr<ForkedRank>> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.push_back(std::make_unique<ForkedRank>([&, rank](const auto&) {
      if (rank != 0) meeting.close_listener();
      return body(rank);
    }));
  }
  meeting.close_listener();
  std::vector<Status> statuses;
  for (auto& rank : ranks) statuses.push_back(rank->result());
  return statuses;
}

void expect_out_of_descriptors(const std::vector<Status>& statuses, int peer, int num_left) {
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kSystem) << num_left << " left: " << status.to_string();
    EXPECT_EQ(status.peer(), peer) << num_left << " left: " << status.to_string();
    EXPECT_NE(status.message().find("file descriptors: limit "), std::string_view::npos)
        << num_left << " left: " << status.to_string();
    EXPECT_NE(status.message().find("ulimit -n"), std::string_view::npos)
        << num_left << " left: " << status.to_string();
  }
}

TEST(FewDescriptors, OfRankZeroAreReportedToAllRanksThatConnect) {
  // One descriptor for the listening socket's spare, and one for each connection.
  for (int num_left = 1; num_left < kNumRanks; ++num_left) {
    const Meeting meeting = Meeting::prepare();
    const auto statuses = run_processes(meeting, [&](int rank) {
      if (rank == 0) leave_descriptors(num_left);
      return create_tcp_bootstrap(meeting.options(rank, kNumRanks, kTimeoutNs)).status();
    });
    expect_out_of_descriptors(statuses, 0, num_left);
  }
}

TEST(FewDescriptors, OfAnotherRankAreReportedByThatRankAtOnce) {
  const Meeting meeting = Meeting::prepare();
  ForkedRank poor([&](const auto&) {
    leave_descriptors(0);
    return create_tcp_bootstrap(meeting.options(1, kNumRanks, kTimeoutNs)).status();
  });
  const Status status = poor.result();
  EXPECT_EQ(status.code(), ErrorCode::kSystem) << status.to_string();
  EXPECT_NE(status.message().find("ulimit -n"), std::string_view::npos) << status.to_string();
  meeting.close_listener();
}

/// Statuses of four processes that form a group while one of them has `num_left` descriptors left.
std::vector<Status> create_groups(int poor_rank, int num_left, int ranks_per_node) {
  const Meeting meeting = Meeting::prepare();
  return run_processes(meeting, [&](int rank) {
    auto bootstrap = create_tcp_bootstrap(meeting.options(rank, kNumRanks, kTimeoutNs));
    if (!bootstrap.ok()) return bootstrap.status();
    if (rank == poor_rank) leave_descriptors(num_left);
    GroupOptions options;
    options.backend = "cpu";
    options.timeout_ns = kTimeoutNs;
    options.arena_bytes = std::size_t{1} << 20;
    options.ranks_per_node = ranks_per_node;
    auto group = Group::create(*bootstrap, options);
    return group.ok() ? (*group)->destroy() : group.status();
  });
}

TEST(FewDescriptors, OfOneRankFailTheGroupOnAllRanksOrLetItForm) {
  for (int poor_rank : {0, 2, kNumRanks - 1}) {
    bool formed = false;
    int num_left = 0;
    // An arena, a listener and three descriptors for each other rank are needed; the bound leaves room for change.
    for (; num_left < 24 && !formed; ++num_left) {
      const auto statuses = create_groups(poor_rank, num_left, kNumRanks);
      formed = statuses[0].ok();
      if (formed) {
        for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << num_left << " left: " << status.to_string();
      } else {
        expect_out_of_descriptors(statuses, poor_rank, num_left);
      }
    }
    EXPECT_TRUE(formed) << "rank " << poor_rank;
    EXPECT_GT(num_left, 3 * (kNumRanks - 1)) << "a link needs three";
  }
}

}  // namespace
}  // namespace ferry::test
