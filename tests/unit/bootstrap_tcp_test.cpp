/// TCP bootstrap with ranks as threads: the messages that each rank receives, and the error that all ranks get on
/// failure.

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>

#include "bootstrap/handshake.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

template <typename Case>
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}

using testing::AllOf;
using testing::HasSubstr;

using Created = Result<std::shared_ptr<Bootstrap>>;

constexpr std::int64_t kLongNs = 60 * kNsPerSecond;
constexpr std::int64_t kShortNs = kNsPerSecond;

std::vector<std::shared_ptr<Bootstrap>> form_group(int num_ranks) {
  const Meeting meeting = Meeting::prepare();
  const auto created =
      run_threads(num_ranks, [&](int rank) { return create_tcp_bootstrap(meeting.options(rank, num_ranks, kLongNs)); });
  std::vector<std::shared_ptr<Bootstrap>> group;
  for (const Created& one : created) group.push_back(one.value());
  return group;
}

/// Content and length depend on rank and round (no bytes for rank 0 in round 0).
std::vector<std::byte> message_of(int rank, int round) {
  return std::vector<std::byte>(static_cast<std::size_t>(rank * 37 + round), static_cast<std::byte>(rank * 16 + round));
}

class GroupSize : public testing::TestWithParam<int> {};

TEST_P(GroupSize, EveryRankGetsEveryMessageByRank) {
  const int num_ranks = GetParam();
  const auto group = form_group(num_ranks);
  constexpr int kNumRounds = 5;
  const auto gathered = run_threads(num_ranks, [&](int rank) {
    std::vector<Result<Messages>> rounds;
    for (int round = 0; round < kNumRounds; ++round) {
      rounds.push_back(group[static_cast<std::size_t>(rank)]->all_gather(message_of(rank, round), kLongNs));
    }
    return rounds;
  });
  for (int round = 0; round < kNumRounds; ++round) {
    Messages expected;
    for (int rank = 0; rank < num_ranks; ++rank) expected.push_back(message_of(rank, round));
    for (const auto& rounds : gathered) {
      const Result<Messages>& result = rounds[static_cast<std::size_t>(round)];
      ASSERT_TRUE(result.ok()) << result.status().to_string();
      EXPECT_EQ(*result, expected);
    }
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    EXPECT_EQ(group[static_cast<std::size_t>(rank)]->rank(), rank);
    EXPECT_EQ(group[static_cast<std::size_t>(rank)]->num_ranks(), num_ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GroupSize, testing::Values(1, 2, 5, 64));

TEST(TcpBootstrap, CarriesTheLongestMessageFromEveryRank) {
  constexpr int kNumRanks = 8;
  const auto group = form_group(kNumRanks);
  const auto longest = [](int rank) {
    std::vector<std::byte> message(kMaxBootstrapMessageBytes);
    for (std::size_t i = 0; i < message.size(); ++i) {
      message[i] = static_cast<std::byte>((i * 31 + i / 256 + static_cast<std::size_t>(rank) * 7) & 0xff);
    }
    return message;
  };
  Messages expected;
  for (int rank = 0; rank < kNumRanks; ++rank) expected.push_back(longest(rank));
  const auto gathered = run_threads(kNumRanks, [&](int rank) {
    return group[static_cast<std::size_t>(rank)]->all_gather(expected[static_cast<std::size_t>(rank)], kLongNs);
  });
  for (const Result<Messages>& result : gathered) {
    ASSERT_TRUE(result.ok()) << result.status().to_string();
    EXPECT_TRUE(*result == expected);
  }
}

TEST(TcpBootstrap, KnowsItsOwnAddress) {
  for (const auto& bootstrap : form_group(3)) EXPECT_EQ(bootstrap->local_address(), "127.0.0.1");
}

TEST(TcpBootstrap, KnowsItsIPv4AddressWhereRank0ListensForBoth) {
  const Meeting meeting = Meeting::prepare();
  TcpBootstrapOptions root = meeting.options(0, 2, kLongNs);
  close(root.listen_fd);
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  socklen_t num_bytes = sizeof any;
  root.listen_fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(root.listen_fd, reinterpret_cast<const sockaddr*>(&any), num_bytes), 0) << std::strerror(errno);
  ASSERT_EQ(listen(root.listen_fd, 1), 0);
  ASSERT_EQ(getsockname(root.listen_fd, reinterpret_cast<sockaddr*>(&any), &num_bytes), 0);
  TcpBootstrapOptions peer = meeting.options(1, 2, kLongNs);
  peer.port = ntohs(any.sin6_port);
  const auto group = run_threads(2, [&](int rank) { return create_tcp_bootstrap(rank == 0 ? root : peer); });
  for (const Created& bootstrap : group) EXPECT_EQ(bootstrap.value()->local_address(), "127.0.0.1");
}

TEST(TcpBootstrap, OneRankNeedsNeitherPortNorSecret) {
  TcpBootstrapOptions options;
  options.rank = 0;
  options.num_ranks = 1;
  const auto alone = create_tcp_bootstrap(options).value();
  EXPECT_EQ(alone->all_gather(bytes_of("me"), kShortNs).value(), Messages{bytes_of("me")});
}

class Culprit : public testing::TestWithParam<int> {};

TEST_P(Culprit, WithATooLongMessageIsBlamedOnAllRanksForEver) {
  constexpr int kNumRanks = 4;
  const auto group = form_group(kNumRanks);
  const auto twice = run_threads(kNumRanks, [&](int rank) {
    const std::size_t size_bytes = rank == GetParam() ? kMaxBootstrapMessageBytes + 1 : 1;
    Bootstrap& mine = *group[static_cast<std::size_t>(rank)];
    const Status first = mine.all_gather(std::vector<std::byte>(size_bytes), kLongNs).status();
    return std::pair(first, mine.all_gather({}, kLongNs).status());
  });
  for (const auto& [first, second] : twice) {
    EXPECT_EQ(first.code(), ErrorCode::kInvalidArgument) << first.to_string();
    EXPECT_EQ(first.peer(), GetParam());
    EXPECT_THAT(std::string(first.message()), AllOf(HasSubstr("1048577"), HasSubstr("1048576")));
    EXPECT_EQ(first.to_string(), twice[0].first.to_string());
    EXPECT_EQ(second.to_string(), first.to_string());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Culprit, testing::Values(0, 2));

TEST(TcpBootstrap, MissingRankIsBlamedOnAllRanksThatArrived) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(3, [&](int thread) {
    constexpr int kPresent[] = {0, 1, 3};
    return create_tcp_bootstrap(meeting.options(kPresent[thread], 5, kShortNs)).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
    EXPECT_EQ(status.peer(), 2);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 2"), HasSubstr("1 more: 4")));
  }
}

TEST(TcpBootstrap, RankWithoutRankZeroReportsWhyItCouldNotConnect) {
  Meeting meeting = Meeting::prepare();
  close(meeting.listen_fd);
  const Status status = create_tcp_bootstrap(meeting.options(1, 2, kShortNs)).status();
  EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
  EXPECT_EQ(status.peer(), 0);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("refused"), HasSubstr(fmt::format("127.0.0.1:{}", meeting.port))));
}

TEST(TcpBootstrap, RankThatDoesNotCallIsBlamedOnAllRanksAndLaterOnItself) {
  constexpr int kNumRanks = 4;
  const auto group = form_group(kNumRanks);
  const auto early = run_threads(
      2, [&](int rank) { return group[static_cast<std::size_t>(rank)]->all_gather({}, kShortNs).status(); });
  for (const Status& status : early) {
    EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
    EXPECT_EQ(status.peer(), 2);
  }
  const Status late = group[2]->all_gather({}, kLongNs).status();
  EXPECT_EQ(late.to_string(), early[0].to_string());
  EXPECT_EQ(late.peer(), 2);
}

TEST(TcpBootstrap, ShortestDeadlineEndsTheWaitForAll) {
  constexpr int kNumRanks = 3;
  const auto group = form_group(kNumRanks);
  const auto statuses = run_threads(2, [&](int rank) {
    const std::int64_t timeout_ns = rank == 1 ? kShortNs : kLongNs;
    return group[static_cast<std::size_t>(rank)]->all_gather({}, timeout_ns).status();
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
    EXPECT_EQ(status.peer(), 2);
  }
}

TEST(TcpBootstrap, SilentRankZeroIsBlamed) {
  const auto group = form_group(3);
  const auto statuses = run_threads(
      2, [&](int thread) { return group[static_cast<std::size_t>(thread) + 1]->all_gather({}, kShortNs).status(); });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
    EXPECT_EQ(status.peer(), 0);
  }
}

class Leaver : public testing::TestWithParam<int> {};

TEST_P(Leaver, IsBlamedOnAllRanksThatStillGather) {
  constexpr int kNumRanks = 4;
  auto group = form_group(kNumRanks);
  const auto statuses = run_threads(kNumRanks, [&](int rank) {
    std::shared_ptr<Bootstrap>& mine = group[static_cast<std::size_t>(rank)];
    if (rank != GetParam()) return mine->all_gather({}, kLongNs).status();
    mine.reset();
    return Status();
  });
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (rank == GetParam()) continue;
    const Status& status = statuses[static_cast<std::size_t>(rank)];
    EXPECT_EQ(status.code(), ErrorCode::kPeerLost) << status.to_string();
    EXPECT_EQ(status.peer(), GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Leaver, testing::Values(0, 3));

TEST(TcpBootstrap, LeavingAfterTheResultHarmsNoRank) {
  constexpr int kNumRanks = 4;
  auto group = form_group(kNumRanks);
  const auto gathered = run_threads(kNumRanks, [&](int rank) {
    std::shared_ptr<Bootstrap>& mine = group[static_cast<std::size_t>(rank)];
    Result<Messages> result = mine->all_gather(std::vector<std::byte>(kMaxBootstrapMessageBytes), kLongNs);
    mine.reset();
    return result.status();
  });
  for (const Status& status : gathered) EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(TcpBootstrap, AnotherSecretIsReportedAsTheLikelyCauseOnBothSides) {
  const Meeting meeting = Meeting::prepare();
  const auto statuses = run_threads(3, [&](int rank) {
    TcpBootstrapOptions options = meeting.options(rank, 3, 2 * kNsPerSecond);
    if (rank == 2) options.secret += "x";
    return create_tcp_bootstrap(options).status();
  });
  for (const int rank : {0, 1}) {
    const Status& status = statuses[static_cast<std::size_t>(rank)];
    EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
    EXPECT_EQ(status.peer(), 2);
    EXPECT_THAT(std::string(status.message()), HasSubstr("another secret"));
  }
  EXPECT_EQ(statuses[2].code(), ErrorCode::kTimeout);
  EXPECT_EQ(statuses[2].peer(), 0);
  EXPECT_THAT(std::string(statuses[2].message()), HasSubstr("same secret"));
}

TEST(TcpBootstrap, ErrorReportsTheAttemptThatCameFurthest) {
  const Meeting meeting = Meeting::prepare();
  auto peer = std::async(std::launch::async,
                         [&] { return create_tcp_bootstrap(meeting.options(1, 2, 2 * kNsPerSecond)).status(); });
  const UniqueFd listener(meeting.listen_fd);
  (void)fcntl(listener.get(), F_SETFL, 0);
  const bootstrap::ChallengeFrame challenge = bootstrap::make_challenge({});
  // Behaves as a rank 0 with another secret: closes the connection after the hello, and does not answer the next
  // attempt.
  UniqueFd connection(accept(listener.get(), nullptr, nullptr));
  ASSERT_EQ(write(connection.get(), challenge.data(), challenge.size()), std::ssize(challenge));
  bootstrap::HelloFrame hello{};
  ASSERT_EQ(recv(connection.get(), hello.data(), hello.size(), MSG_WAITALL), std::ssize(hello));
  connection = {};
  connection = UniqueFd(accept(listener.get(), nullptr, nullptr));
  ASSERT_EQ(write(connection.get(), challenge.data(), challenge.size()), std::ssize(challenge));
  const Status status = peer.get();
  EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr("same secret"));
}

TEST(TcpBootstrap, RankTriesAgainUntilTheRealRankZeroListens) {
  const Meeting meeting = Meeting::prepare();
  auto peer = std::async(std::launch::async, [&] { return create_tcp_bootstrap(meeting.options(1, 2, kLongNs)); });
  {
    // At first another process has the port and closes the connection, then no process listens.
    const UniqueFd impostor(meeting.listen_fd);
    (void)fcntl(impostor.get(), F_SETFL, 0);
    const UniqueFd closed_at_once(accept(impostor.get(), nullptr, nullptr));
    ASSERT_TRUE(closed_at_once.valid());
  }
  TcpBootstrapOptions options = meeting.options(0, 2, kLongNs);
  options.listen_fd = -1;
  const Created root = create_tcp_bootstrap(options);
  EXPECT_TRUE(root.ok()) << root.status().to_string();
  EXPECT_TRUE(peer.get().ok());
}

class Host : public testing::TestWithParam<std::string> {};

TEST_P(Host, CanBeListenedOnAndReached) {
  // The port was free a moment ago; rank 0 reports an error if it has been taken since.
  const Meeting free_port = Meeting::prepare();
  free_port.close_listener();
  const auto created = run_threads(3, [&](int rank) {
    TcpBootstrapOptions options;
    options.rank = rank;
    options.num_ranks = 3;
    options.host = GetParam();
    options.port = free_port.port;
    options.secret = "s";
    return create_tcp_bootstrap(options);
  });
  for (const Created& one : created) EXPECT_TRUE(one.ok()) << one.status().to_string();
}

INSTANTIATE_TEST_SUITE_P(Names, Host, testing::Values("127.0.0.1", "localhost", "::1", "[::1]"));

TEST(TcpBootstrap, TakenPortIsReportedAtOnceWithWhatToDo) {
  const Meeting meeting = Meeting::prepare();
  const UniqueFd holder(meeting.listen_fd);
  TcpBootstrapOptions options = meeting.options(0, 2, kLongNs);
  options.listen_fd = -1;
  const Status status = create_tcp_bootstrap(options).status();
  EXPECT_EQ(status.code(), ErrorCode::kSystem);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(fmt::format("127.0.0.1:{}", meeting.port)), HasSubstr("another port")));
}

TEST(TcpBootstrap, DescriptorThatDoesNotListenIsRefusedAndClosed) {
  Meeting meeting = Meeting::prepare();
  close(meeting.listen_fd);
  meeting.listen_fd = socket(AF_INET, SOCK_STREAM, 0);
  const Status status = create_tcp_bootstrap(meeting.options(0, 2, kLongNs)).status();
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("listen_fd"));
  EXPECT_EQ(fcntl(meeting.listen_fd, F_GETFD), -1) << "ownership had passed to the bootstrap";
}

struct BadOption {
  const char* name;
  void (*spoil)(TcpBootstrapOptions*);
  const char* mentioned;
};

class BadOptions : public testing::TestWithParam<BadOption> {};

TEST_P(BadOptions, AreRefusedByName) {
  TcpBootstrapOptions options;
  options.rank = 1;
  options.num_ranks = 4;
  options.port = 28000;
  options.secret = "s";
  GetParam().spoil(&options);
  const Status status = create_tcp_bootstrap(options).status();
  EXPECT_EQ(status.code(), ErrorCode::kInvalidArgument) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().mentioned));
}

INSTANTIATE_TEST_SUITE_P(
    Each, BadOptions,
    testing::Values(BadOption{"rank_too_large", [](TcpBootstrapOptions* o) { o->rank = 4; }, "rank=4, expected 0 to 3"},
                    BadOption{"rank_negative", [](TcpBootstrapOptions* o) { o->rank = -1; }, "rank=-1"},
                    BadOption{"no_ranks", [](TcpBootstrapOptions* o) { o->num_ranks = 0; }, "num_ranks=0"},
                    BadOption{"no_secret", [](TcpBootstrapOptions* o) { o->secret.clear(); }, "openssl rand -hex 32"},
                    BadOption{"no_port", [](TcpBootstrapOptions* o) { o->port = 0; }, "port=0"},
                    BadOption{"no_host", [](TcpBootstrapOptions* o) { o->host.clear(); }, "no host"},
                    // Not a valid name, so that no name server is asked, for which a machine without a network would
                    // wait.
                    BadOption{"no_such_host", [](TcpBootstrapOptions* o) { o->host = "no such host"; }, "no such host"},
                    BadOption{"no_time", [](TcpBootstrapOptions* o) { o->timeout_ns = 0; }, "timeout_ns=0"}),
    case_name<BadOption>);

}  // namespace
}  // namespace ferry::test
