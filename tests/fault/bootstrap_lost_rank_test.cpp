/// Rank processes that are killed or stopped while the others gather.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>

#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

template <typename Case>
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

constexpr int kNumRanks = 4;
constexpr std::int64_t kLongNs = 60 * kNsPerSecond;
constexpr std::int64_t kShortNs = 2 * kNsPerSecond;

struct Fault {
  const char* name;
  int victim;
  int signal_number;
  ErrorCode expected;
};

class LostRank : public testing::TestWithParam<Fault> {
 protected:
  static std::vector<std::unique_ptr<ForkedRank>> fork_ranks(const Meeting& meeting, int victim,
                                                             std::int64_t gather_timeout_ns) {
    std::vector<std::unique_ptr<ForkedRank>> ranks;
    for (int rank = 0; rank < kNumRanks; ++rank) {
      ranks.push_back(std::make_unique<ForkedRank>([&, rank](const ForkedRank::Checkpoint& checkpoint) {
        if (rank != 0) close(meeting.listen_fd);
        auto bootstrap = create_tcp_bootstrap(meeting.options(rank, kNumRanks, kLongNs));
        if (!bootstrap.ok()) return bootstrap.status();
        if (const Status status = (*bootstrap)->all_gather({}, kLongNs).status(); !status.ok()) return status;
        if (rank == victim) {
          checkpoint();
          for (;;) pause();
        }
        const Status first = (*bootstrap)->all_gather(bytes_of("x"), gather_timeout_ns).status();
        const Status second = (*bootstrap)->all_gather(bytes_of("x"), gather_timeout_ns).status();
        if (first.to_string() != second.to_string()) return Status(ErrorCode::kInternal, "the errors differ");
        return first;
      }));
    }
    return ranks;
  }
};

TEST_P(LostRank, IsBlamedOnEverySurvivor) {
  const Fault& fault = GetParam();
  const Meeting meeting = Meeting::prepare();
  // A killed rank is detected by its closed connection, long before the deadline; a stopped one only by the deadline.
  const auto ranks = fork_ranks(meeting, fault.victim, fault.signal_number == SIGKILL ? kLongNs : kShortNs);
  close(meeting.listen_fd);
  ranks[static_cast<std::size_t>(fault.victim)]->await_checkpoint();
  ranks[static_cast<std::size_t>(fault.victim)]->send_signal(fault.signal_number);
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (rank == fault.victim) continue;
    const Status status = ranks[static_cast<std::size_t>(rank)]->result();
    EXPECT_EQ(status.code(), fault.expected) << "rank " << rank << ": " << status.to_string();
    EXPECT_EQ(status.peer(), fault.victim) << "rank " << rank << ": " << status.to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, LostRank,
                         testing::Values(Fault{"kill_a_rank", 2, SIGKILL, ErrorCode::kPeerLost},
                                         Fault{"kill_rank_zero", 0, SIGKILL, ErrorCode::kPeerLost},
                                         Fault{"stop_a_rank", 2, SIGSTOP, ErrorCode::kTimeout},
                                         Fault{"stop_rank_zero", 0, SIGSTOP, ErrorCode::kTimeout}),
                         case_name<Fault>);

TEST(ForkedRanks, FormAGroupAndGather) {
  const Meeting meeting = Meeting::prepare();
  std::vector<std::unique_ptr<ForkedRank>> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.push_back(std::make_unique<ForkedRank>([&, rank](const ForkedRank::Checkpoint&) {
      auto bootstrap = create_tcp_bootstrap(meeting.options(rank, kNumRanks, kLongNs));
      if (!bootstrap.ok()) return bootstrap.status();
      const auto gathered = (*bootstrap)->all_gather(bytes_of(std::to_string(rank)), kLongNs);
      if (!gathered.ok()) return gathered.status();
      const Messages expected = {bytes_of("0"), bytes_of("1"), bytes_of("2"), bytes_of("3")};
      return *gathered == expected ? Status() : Status(ErrorCode::kInternal, "the messages differ from those sent");
    }));
  }
  close(meeting.listen_fd);
  for (const auto& rank : ranks) {
    const Status status = rank->result();
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

TEST(ForkedRanks, RankKilledWhileTheGroupFormsCanBeStartedAgain) {
  const Meeting meeting = Meeting::prepare();
  const auto start = [&](int rank) {
    return std::make_unique<ForkedRank>([&, rank](const ForkedRank::Checkpoint&) {
      return create_tcp_bootstrap(meeting.options(rank, 3, kLongNs)).status();
    });
  };
  const auto root = start(0);
  auto first = start(1);
  first.reset();
  const auto again = start(1);
  const auto last = start(2);
  close(meeting.listen_fd);
  for (const auto& status : {root->result(), again->result(), last->result()}) {
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

}  // namespace
}  // namespace ferry::test
