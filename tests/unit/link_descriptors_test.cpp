/// Links between processes of one host when file descriptors run out at one end.

#include "node/peer_link.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <utility>

#include "node/futex.hpp"
#include "support/bootstrap_ranks.hpp"
#include "support/descriptors.hpp"

namespace ferry::test {
namespace {

/// Long enough that the test would exceed its own time limit.
constexpr std::int64_t kTimeoutNs = 600 * kNsPerSecond;

void expect_out_of_descriptors(const Status& status) {
  EXPECT_EQ(status.code(), ErrorCode::kSystem) << status.to_string();
  EXPECT_NE(status.message().find("file descriptors: limit "), std::string_view::npos) << status.to_string();
  EXPECT_NE(status.message().find("ulimit -n"), std::string_view::npos) << status.to_string();
}

struct Ends {
  node::LinkListener listener = node::LinkListener::create(2).value();
  node::LinkToken token{1, 2, 3};
  UniqueFd arena{eventfd(0, EFD_CLOEXEC)};

  node::LinkHello hello(int rank) const { return {rank, token, arena.get()}; }
  std::int64_t deadline() const { return node::monotonic_ns() + kTimeoutNs; }
  Status accept() const { return listener.accept_peer(hello(0), deadline()).status(); }
  Status connect() const {
    Result<node::OpenedLink> opened = node::open_link(listener.name(), 0, token, hello(1));
    return opened.ok() ? node::await_answer(std::move(*opened), deadline()).status() : opened.status();
  }
};

TEST(LinkDescriptors, LinksWithEnoughDescriptors) {
  const Ends ends;
  ForkedRank connecting([&](const auto&) { return ends.connect(); });
  EXPECT_TRUE(ends.accept().ok());
  EXPECT_TRUE(connecting.result().ok());
}

TEST(LinkDescriptors, ThatCannotBeAcceptedIsRefusedAtOnce) {
  for (int num_left : {0, 1}) {  // no room for the connection, or for the arena sent with it
    const Ends ends;
    ForkedRank connecting([&](const auto&) { return ends.connect(); });
    ForkedRank accepting([&](const auto&) {
      leave_descriptors(num_left);
      return ends.accept();
    });
    expect_out_of_descriptors(accepting.result());
    connecting.send_signal(SIGKILL);
  }
}

TEST(LinkDescriptors, ThatCannotBeMadeIsRefusedAtOnce) {
  for (int num_left : {0, 1}) {
    const Ends ends;
    ForkedRank accepting([&](const auto&) { return ends.accept(); });
    ForkedRank connecting([&](const auto&) {
      leave_descriptors(num_left);
      return ends.connect();
    });
    expect_out_of_descriptors(connecting.result());
    accepting.send_signal(SIGKILL);
  }
}

TEST(LinkDescriptors, AMessageWhoseDescriptorIsLostIsAnError) {
  std::array<int, 2> sockets{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()), 0);
  const node::PeerLink sender{UniqueFd(sockets[0]), UniqueFd()};
  const node::PeerLink receiver{UniqueFd(sockets[1]), UniqueFd()};
  const UniqueFd sent(eventfd(0, EFD_CLOEXEC));
  ASSERT_TRUE(sender.send(bytes_of("with a descriptor"), sent.get()).ok());
  ASSERT_TRUE(sender.send(bytes_of("without"), -1).ok());
  ForkedRank receiving([&](const auto&) {
    leave_descriptors(0);
    Status first = receiver.receive().status();
    const Result<node::ReceivedMessage> second = receiver.receive();
    if (!second.ok() || text_of(second->bytes) != "without") return Status(ErrorCode::kInternal, "no second message");
    return first;
  });
  expect_out_of_descriptors(receiving.result());
}

}  // namespace
}  // namespace ferry::test
