/// The socket between two rank processes, here with both ends in one.

#include "node/peer_link.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <utility>

namespace ferry::node {
namespace {

class PeerLinkTest : public testing::Test {
 protected:
  void SetUp() override {
    std::array<int, 2> sockets{-1, -1};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()), 0);
    here_ = std::make_unique<PeerLink>(UniqueFd(sockets[0]), UniqueFd());
    there_ = std::make_unique<PeerLink>(UniqueFd(sockets[1]), UniqueFd());
  }

  std::unique_ptr<PeerLink> here_;
  std::unique_ptr<PeerLink> there_;
};

TEST_F(PeerLinkTest, ASharedOneOutlivesTheFirstAndStillSeesThePeerGo) {
  const auto shared = here_->share();
  ASSERT_TRUE(shared.ok()) << shared.status().to_string();
  here_.reset();
  EXPECT_FALSE((*shared)->gone());
  EXPECT_FALSE(there_->gone()) << "the shared one holds this side open";
  there_.reset();
  EXPECT_TRUE((*shared)->gone());
}

TEST_F(PeerLinkTest, APeerThatEndsItsSendingIsGoneThoughItSharesTheLink) {
  const auto shared = here_->share();
  ASSERT_TRUE(shared.ok()) << shared.status().to_string();
  here_->end_sending();
  EXPECT_TRUE(there_->gone());
  EXPECT_FALSE((*shared)->gone()) << "the other side has not ended";
  there_->end_sending();
  EXPECT_TRUE((*shared)->gone());
}

}  // namespace
}  // namespace ferry::node
