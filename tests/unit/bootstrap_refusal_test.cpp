/// Refusals of rank 0: every rank gets the same error, whenever it connects.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>
#include <future>
#include <iterator>
#include <vector>

#include "bootstrap/channel.hpp"
#include "bootstrap/handshake.hpp"
#include "bootstrap/tcp_bootstrap.hpp"
#include "ferry/version.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kNumRanks = 4;
constexpr std::int64_t kJoinTimeoutNs = 20 * kNsPerSecond;

/// Options of a process that has the secret.
TcpBootstrapOptions claim(const Meeting& meeting, int rank, int num_ranks = kNumRanks) {
  return meeting.options(rank, num_ranks, kJoinTimeoutNs);
}

Status join(const TcpBootstrapOptions& options, const std::string& its_version = version()) {
  return bootstrap::create_tcp_peer(options, its_version, {}).status();
}

/// Authenticates as rank 1, then sends a frame that has no place while the group forms; returns the answer.
Status send_message_too_early(const Meeting& meeting) {
  UniqueFd fd = connect_stranger(meeting.port);
  bootstrap::ChallengeFrame challenge{};
  if (recv(fd.get(), challenge.data(), challenge.size(), MSG_WAITALL) != std::ssize(challenge)) return {};
  const bootstrap::Nonce nonce = bootstrap::parse_challenge(challenge).value();
  const bootstrap::Hello hello{
      .nonce = {}, .instance = {}, .rank = 1, .num_ranks = kNumRanks, .version = version(), .proof = {}};
  const bootstrap::HelloFrame sent = bootstrap::make_hello(meeting.secret, nonce, hello).value();
  send_text(fd, {reinterpret_cast<const char*>(sent.data()), sent.size()});
  const bootstrap::SessionKeys keys = bootstrap::derive_session_keys(meeting.secret, nonce, hello).value();
  bootstrap::Channel channel(std::move(fd), {.send = keys.peer_to_root, .receive = keys.root_to_peer});
  if (!channel.queue(bootstrap::FrameType::kMessage, {}).ok() || !channel.flush()) return {};
  bootstrap::Frame frame;
  while (channel.receive(&frame) == bootstrap::ReceiveOutcome::kFrame) {
    if (frame.type == bootstrap::FrameType::kFailure) return bootstrap::status_of_failure(frame.payload);
  }
  return {};
}

struct Offence {
  const char* name;
  /// Makes rank 0 refuse the group, as a process beside its ranks; returns the error that this process gets.
  std::function<Status(const Meeting&)> commit;
  ErrorCode code;
  const char* words;
};

class RefusalOfGroup : public testing::TestWithParam<Offence> {};

TEST_P(RefusalOfGroup, ReachesEveryRankThatConnectsAfterwards) {
  const Meeting meeting = Meeting::prepare();
  auto root = std::async(std::launch::async, [&] { return create_tcp_bootstrap(claim(meeting, 0)).status(); });
  const Status first = GetParam().commit(meeting);
  EXPECT_EQ(first.code(), GetParam().code) << first.to_string();
  EXPECT_THAT(std::string(first.message()), HasSubstr(GetParam().words));
  // The rank whose number the offender may have claimed comes last.
  for (int rank = kNumRanks - 1; rank > 0; --rank) {
    EXPECT_EQ(join(claim(meeting, rank)).to_string(), first.to_string()) << "rank " << rank;
  }
  EXPECT_EQ(root.get().to_string(), first.to_string());
}

INSTANTIATE_TEST_SUITE_P(
    Offences, RefusalOfGroup,
    testing::Values(Offence{"another_version", [](const Meeting& meeting) { return join(claim(meeting, 1), "7.8.9"); },
                            ErrorCode::kInvalidArgument, "different versions"},
                    Offence{"fewer_ranks", [](const Meeting& meeting) { return join(claim(meeting, 1, 2)); },
                            ErrorCode::kInvalidArgument, "disagree on num_ranks"},
                    Offence{"more_ranks", [](const Meeting& meeting) { return join(claim(meeting, 5, 6)); },
                            ErrorCode::kInvalidArgument, "disagree on num_ranks"},
                    Offence{"rank_out_of_range", [](const Meeting& meeting) { return join(claim(meeting, 99)); },
                            ErrorCode::kInvalidArgument, "connected as rank 99, expected 1 to 3"},
                    Offence{"second_rank_zero", [](const Meeting& meeting) { return join(claim(meeting, 0)); },
                            ErrorCode::kInvalidArgument, "connected as rank 0, expected 1 to 3"},
                    Offence{"rank_claimed_twice",
                            [](const Meeting& meeting) {
                              return run_threads(2, [&](int) { return join(claim(meeting, 2)); }).front();
                            },
                            ErrorCode::kInvalidArgument, "two processes claim to be rank 2"},
                    Offence{"unexpected_frame", send_message_too_early, ErrorCode::kTransport,
                            "unexpected frame of type 5"}),
    [](const testing::TestParamInfo<Offence>& offence) { return offence.param.name; });

TEST(Refusal, DifferentNumbersOfRanksAreReportedToAll) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(4, [&](int rank) {
    return create_tcp_bootstrap(meeting.options(rank, rank == 2 ? 5 : 4, 6 * kNsPerSecond)).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("num_ranks"), HasSubstr("rank 0 has 4"), HasSubstr("rank 2 has 5")));
    EXPECT_EQ(status.to_string(), statuses[0].to_string());
  }
}

TEST(Refusal, RankThatConnectsLateGetsTheSameError) {
  const Meeting meeting = Meeting::prepare();
  auto root = std::async(std::launch::async,
                         [&] { return create_tcp_bootstrap(meeting.options(0, 3, 6 * kNsPerSecond)).status(); });
  const Status first = create_tcp_bootstrap(meeting.options(1, 9, 6 * kNsPerSecond)).status();
  const Status late = create_tcp_bootstrap(meeting.options(2, 3, 6 * kNsPerSecond)).status();
  EXPECT_EQ(first.code(), ErrorCode::kInvalidArgument) << first.to_string();
  EXPECT_EQ(late.to_string(), first.to_string());
  EXPECT_EQ(root.get().to_string(), first.to_string());
}

TEST(Refusal, DifferentVersionsAreReportedToAll) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(3, [&](int rank) {
    return bootstrap::create_tcp_bootstrap_as(meeting.options(rank, 3, 6 * kNsPerSecond),
                                              rank == 1 ? "7.8.9-rc1" : "7.8.8")
        .status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 0 has 7.8.8"), HasSubstr("rank 1 has 7.8.9-rc1")));
    EXPECT_EQ(status.to_string(), statuses[0].to_string());
  }
}

TEST(Refusal, TwoProcessesWithOneRankAreReportedToAll) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(4, [&](int thread) {
    constexpr int kRanks[] = {0, 1, 1, 2};
    return create_tcp_bootstrap(meeting.options(kRanks[thread], 4, 6 * kNsPerSecond)).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
    EXPECT_EQ(status.peer(), 1);
    EXPECT_THAT(std::string(status.message()), HasSubstr("two processes claim to be rank 1"));
    EXPECT_EQ(status.to_string(), statuses[0].to_string());
  }
}

}  // namespace
}  // namespace ferry::test
