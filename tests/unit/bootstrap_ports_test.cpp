/// Rank 0 takes a spare port where its own is taken, and the other ranks find it beside whatever listens on the others.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/handshake.hpp"
#include "bootstrap/ports.hpp"
#include "support/bootstrap_ranks.hpp"

namespace ferry::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kNumJoining = 3;
constexpr std::int64_t kPatienceNs = 60 * kNsPerSecond;

/// Listening socket of another program; invalid if the port is taken.
UniqueFd occupy(std::uint16_t port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool listens = bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                       listen(fd.get(), SOMAXCONN) == 0;
  return listens ? std::move(fd) : UniqueFd();
}

/// Options whose first port and `num_taken` - 1 spare ports belong to other programs, and whose next one is free.
struct TakenPorts {
  TcpBootstrapOptions options;
  std::vector<UniqueFd> holders;

  static TakenPorts prepare(int num_taken, int num_spare_ports) {
    // Another process may have one of the derived ports: then another first port is chosen.
    for (;;) {
      const Meeting meeting = Meeting::prepare();
      TakenPorts taken{.options = meeting.options(0, kNumJoining, kPatienceNs), .holders = {}};
      taken.options.listen_fd = -1;
      taken.options.num_spare_ports = num_spare_ports;
      taken.holders.emplace_back(meeting.listen_fd);
      const std::vector<std::uint16_t> ports = bootstrap::ports_of(taken.options);
      for (int i = 1; i < num_taken; ++i) taken.holders.push_back(occupy(ports[static_cast<std::size_t>(i)]));
      const bool is_next_free =
          num_taken > num_spare_ports || occupy(ports[static_cast<std::size_t>(num_taken)]).valid();
      if (is_next_free && std::ranges::all_of(taken.holders, &UniqueFd::valid)) return taken;
    }
  }
};

/// Behaviour of another program towards every connection to its port.
struct Foreigner {
  const char* name;
  std::function<void(const UniqueFd& connection)> behave;
};

class ForeignPort : public testing::TestWithParam<Foreigner> {
 protected:
  /// Accepts, behaves and keeps the connection until the listener is shut down.
  static void serve(const UniqueFd& listener) {
    std::vector<UniqueFd> connections;
    for (;;) {
      connections.emplace_back(accept(listener.get(), nullptr, nullptr));
      if (!connections.back().valid()) return;
      GetParam().behave(connections.back());
    }
  }
};

TEST_P(ForeignPort, DoesNotStopRanksFromFindingRankZeroOnASparePort) {
  const TakenPorts taken = TakenPorts::prepare(2, bootstrap::kNumSparePorts);
  std::vector<std::jthread> servers;
  for (const UniqueFd& holder : taken.holders) servers.emplace_back([&] { serve(holder); });
  const auto statuses = run_threads(kNumJoining, [&](int rank) {
    TcpBootstrapOptions options = taken.options;
    options.rank = rank;
    return create_tcp_bootstrap(options).status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  for (const UniqueFd& holder : taken.holders) (void)shutdown(holder.get(), SHUT_RDWR);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, ForeignPort,
    testing::Values(
        Foreigner{"silent", [](const auto&) {}},
        Foreigner{"closes", [](const auto& connection) { (void)shutdown(connection.get(), SHUT_RDWR); }},
        Foreigner{"greets", [](const auto& connection) { send_text(connection, "SSH-2.0-x\r\n"); }},
        Foreigner{"garbage", [](const auto& connection) { send_text(connection, std::string(999, '\xff')); }},
        Foreigner{"stops_after_its_challenge",
                  [](const auto& connection) {
                    const bootstrap::ChallengeFrame challenge = bootstrap::make_challenge({});
                    send_text(connection, {reinterpret_cast<const char*>(challenge.data()), challenge.size()});
                  }}),
    [](const testing::TestParamInfo<Foreigner>& kind) { return kind.param.name; });

TEST(SparePorts, OfAnotherGroupDoNotConfuse) {
  const TakenPorts taken = TakenPorts::prepare(1, bootstrap::kNumSparePorts);
  // Another job's rank 0 has the first port, and waits for a rank of its own.
  TcpBootstrapOptions other = taken.options;
  other.secret += "x";
  other.num_ranks = 2;
  other.listen_fd = dup(taken.holders.front().get());
  auto other_root = std::async(std::launch::async, [&] { return create_tcp_bootstrap(other).status(); });
  const auto statuses = run_threads(kNumJoining, [&](int rank) {
    TcpBootstrapOptions options = taken.options;
    options.rank = rank;
    return create_tcp_bootstrap(options).status();
  });
  for (const Status& status : statuses) EXPECT_TRUE(status.ok()) << status.to_string();
  TcpBootstrapOptions its_peer = other;
  its_peer.rank = 1;
  its_peer.listen_fd = -1;
  EXPECT_TRUE(create_tcp_bootstrap(its_peer).ok());
  EXPECT_TRUE(other_root.get().ok());
}

TEST(SparePorts, AllTakenIsReportedAtOnceWithTheVariablesThatSetThem) {
  for (const int num_spare_ports : {0, 2}) {
    const TakenPorts taken = TakenPorts::prepare(num_spare_ports + 1, num_spare_ports);
    const Status status = create_tcp_bootstrap(taken.options).status();
    EXPECT_EQ(status.code(), ErrorCode::kSystem) << status.to_string();
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("FERRY_PORT"), HasSubstr("MASTER_PORT")));
    for (const std::uint16_t port : bootstrap::ports_of(taken.options)) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(port)));
    }
  }
}

TEST(SparePorts, RankWithoutRankZeroNamesAllPortsAndTheOneThatAnswered) {
  const TakenPorts taken = TakenPorts::prepare(1, 2);
  TcpBootstrapOptions options = taken.options;
  options.rank = 1;
  options.timeout_ns = kNsPerSecond;
  const Status status = create_tcp_bootstrap(options).status();
  EXPECT_EQ(status.code(), ErrorCode::kTimeout) << status.to_string();
  for (const std::uint16_t port : bootstrap::ports_of(options)) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(port)));
  }
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(fmt::format("127.0.0.1:{}: the process that listens there sends no challenge", options.port)));
}

}  // namespace
}  // namespace ferry::test
