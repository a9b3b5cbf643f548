/// Order of writes into GPU memory, reads from it, and messages.

#include <string>

#include "net/ucx/paths.hpp"
#include "unit/net_ucx_noted.hpp"

namespace ferry::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class NetUcxReadBack : public NetUcxNoted {};

TEST_F(NetUcxReadBack, ANotifyWaitsForAReadThatFollowsTheFlush) {
  ASSERT_TRUE(open(true).ok());
  put_into_gpu(0);
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("put");
  EXPECT_THAT(take_names(), ElementsAre());
  complete("flush");
  EXPECT_FALSE(connection_->quiet());
  EXPECT_THAT(take_names(), ElementsAre("get"));
  EXPECT_EQ(notes_.in_flight.back().remote, kGpuBase);
  EXPECT_EQ(notes_.in_flight.back().params.memory_type, UCS_MEMORY_TYPE_HOST);
  EXPECT_THAT(take_names(), ElementsAre());
  complete("get");
  EXPECT_THAT(take_names(), ElementsAre("message"));
  complete("message");
  EXPECT_TRUE(connection_->quiet());
}

TEST_F(NetUcxReadBack, OneReadServesAllWritesBeforeIt) {
  ASSERT_TRUE(open(true).ok());
  for (int channel = 0; channel < 2; ++channel) {
    put_into_gpu(channel);
    notify(channel);
    EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  }
  complete("flush");
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  // A write after the read began needs one of its own.
  put_into_gpu(0);
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  complete("get");
  EXPECT_THAT(take_names(), ElementsAre("message", "message"));
  complete("get");
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxReadBack, WritesIntoHostMemoryNeedNone) {
  ASSERT_TRUE(open(true).ok());
  put_into_host(0);
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxReadBack, AGpuThatSeesWritesInOrderNeedsNone) {
  notes_.lanes = kTwoCards;
  ASSERT_TRUE(open(false).ok());
  put_into_gpu(0);
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxReadBack, AFenceOrdersPutsWhereTheProgramSaysThatCardsKeepOrder) {
  ASSERT_TRUE(open(false, true).ok());
  put_into_gpu(0);
  connection_->order_puts();
  put_into_gpu(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "fence", "put"));
}

TEST_F(NetUcxReadBack, ElseAPutIsHeldUntilAFlushOfThoseBeforeItHasCompleted) {
  ASSERT_TRUE(open(false).ok());
  EXPECT_TRUE(connection_->shows_puts());
  put_into_gpu(0);
  connection_->order_puts();
  put_into_gpu(0);
  put_into_host(0);
  connection_->release(7);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("put");
  EXPECT_FALSE(connection_->is_released()) << "a put that is held has a source";
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("put", "put"));
  // What follows them waits for a flush of its own.
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("flush"));
  complete("put");
  complete("put");
  EXPECT_TRUE(connection_->is_released());
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxReadBack, APutIsHeldUntilThoseBeforeItAreReadBack) {
  ASSERT_TRUE(open(true, true).ok());
  EXPECT_FALSE(connection_->shows_puts());
  put_into_gpu(0);
  connection_->order_puts();
  put_into_gpu(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  complete("get");
  EXPECT_THAT(take_names(), ElementsAre("put"));
}

TEST_F(NetUcxReadBack, AFenceOrdersNoPutsOfTwoCards) {
  notes_.lanes = kTwoCards;
  ASSERT_TRUE(open(false, true).ok());
  put_into_gpu(0);
  connection_->order_puts();
  put_into_gpu(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
}

TEST_F(NetUcxReadBack, PutsThatAreHeldEndWithTheConnection) {
  ASSERT_TRUE(open(false).ok());
  put_into_gpu(0);
  connection_->order_puts();
  put_into_gpu(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  connection_->shut();
  complete("put", UCS_ERR_CANCELED);
  complete("flush", UCS_ERR_CANCELED);
  EXPECT_TRUE(connection_->is_shut());
}

TEST_F(NetUcxReadBack, AReadThatFailsEndsTheConnection) {
  ASSERT_TRUE(open(true).ok());
  put_into_gpu(0);
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  complete("get", UCS_ERR_IO_ERROR);
  EXPECT_THAT(take_names(), ElementsAre());
  EXPECT_EQ(connection_->failure(), UCS_ERR_IO_ERROR);
}

TEST_F(NetUcxReadBack, SeveralCardsAreRefused) {
  notes_.lanes = kTwoCards;
  const Status status = open(true);
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported) << status.to_string();
  EXPECT_EQ(status.peer(), 1);
  EXPECT_THAT(std::string(status.message()), HasSubstr("name one device in FERRY_NET_DEVICES"));
}

TEST(NetUcxPaths, WritingDevicesAreCountedOnce) {
  using net::ucx::num_writing_devices;
  using net::ucx::parse_lanes;
  EXPECT_EQ(num_writing_devices(parse_lanes(kOneCard)), 1U);
  EXPECT_EQ(num_writing_devices(parse_lanes(kTwoCards)), 2U);
  EXPECT_EQ(num_writing_devices({{.transport = "rc_mlx5/mlx5_0:1.0"}, {.transport = "dc_mlx5/mlx5_0:1.1"}}), 1U);
  EXPECT_EQ(num_writing_devices({{.transport = "tcp/eth0.0"}}), 0U);
}

}  // namespace
}  // namespace ferry::test
