/// Notifies behind a card's writes, small puts that need none, and the probe of GPU memory.

#include <cstring>
#include <string>

#include "unit/net_ucx_noted.hpp"

namespace ferry::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class NetUcxWrites : public NetUcxNoted {
 protected:
  NetUcxWrites() { EXPECT_TRUE(open(false).ok()); }

  bool put_notify(int channel, std::size_t num_bytes, std::uint64_t value) {
    return connection_->put_notify({.kind = net::ucx::MessageKind::kPutNotify,
                                    .channel = static_cast<std::uint32_t>(channel),
                                    .value = 64,
                                    .operand = value},
                                   0, num_bytes);
  }
};

TEST_F(NetUcxWrites, NotifiesThatOneFlushServesAreOneMessageOfTheHighestValue) {
  for (const std::uint64_t value : {1U, 3U, 2U}) {
    put_into_host(0);
    notify(0, value);
  }
  put_into_host(1);
  notify(1, 9);
  EXPECT_THAT(take_names(), ElementsAre("put", "put", "put", "put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message", "message"));
  EXPECT_THAT(take_values(), ElementsAre(3U, 9U));
}

TEST_F(NetUcxWrites, ANotifyWaitsForNoLaterWriteThatHasAFlushOfItsOwn) {
  for (const std::uint64_t value : {1U, 2U, 3U}) {
    put_into_host(0);
    notify(0, value);
    EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  }
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
  EXPECT_THAT(take_values(), ElementsAre(1U));
  complete("flush");
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
  EXPECT_THAT(take_values(), ElementsAre(3U));
}

TEST_F(NetUcxWrites, AFewBytesAndTheirNotifyAreOneMessageWithoutAFlush) {
  EXPECT_TRUE(put_notify(0, 64, 5));
  EXPECT_THAT(take_names(), ElementsAre("message with bytes"));
  EXPECT_THAT(take_values(), ElementsAre(5U));
  put_into_host(1);
  notify(1);
  EXPECT_THAT(take_names(), ElementsAre("put", "flush"));
  EXPECT_TRUE(put_notify(0, 64, 6)) << "another channel's write is under way";
  EXPECT_FALSE(put_notify(1, 64, 2)) << "its own channel's is";
  EXPECT_THAT(take_names(), ElementsAre("message with bytes"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
  EXPECT_TRUE(put_notify(1, 64, 2));
}

TEST_F(NetUcxWrites, ManyBytesAreWritten) {
  EXPECT_TRUE(put_notify(0, net::ucx::kMaxOneMessageBytes, 1));
  EXPECT_FALSE(put_notify(0, net::ucx::kMaxOneMessageBytes + 1, 2));
  EXPECT_THAT(take_names(), ElementsAre("message with bytes"));
}

/// Wherever a put into GPU memory comes from, and however short it is.
TEST_F(NetUcxWrites, PutsIntoGpuMemoryAreWritesThatANumberWaitsFor) {
  const std::vector<std::byte> other(64);
  connection_->put_from(0, other, net::kGpuOffset + 128);
  ASSERT_EQ(notes_.in_flight.size(), 1U);
  EXPECT_EQ(notes_.in_flight.back().remote, kGpuBase + 128);
  EXPECT_EQ(notes_.in_flight.back().params.memory_type, UCS_MEMORY_TYPE_CUDA);
  EXPECT_EQ(notes_.in_flight.back().params.op_attr_mask & UCP_OP_ATTR_FIELD_MEMH, 0U) << "it is not registered";
  connection_->put_from(0, std::span(gpu_memory_).first(64), net::kGpuOffset);
  EXPECT_NE(notes_.in_flight.back().params.op_attr_mask & UCP_OP_ATTR_FIELD_MEMH, 0U);
  const net::ucx::Message message{.kind = net::ucx::MessageKind::kPutSet, .value = net::kGpuOffset};
  EXPECT_FALSE(connection_->put_with(message, other)) << "the processor of the peer does not write there";
  notify(0);
  EXPECT_THAT(take_names(), ElementsAre("put", "put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxWrites, APutIntoGpuMemoryThatLeavesItEndsTheConnection) {
  const std::vector<std::byte> other(64);
  connection_->put_from(0, other, net::kGpuOffset + gpu_memory_.size() - 63);
  EXPECT_THAT(take_names(), ElementsAre());
  EXPECT_EQ(connection_->failure(), UCS_ERR_OUT_OF_RANGE);
}

TEST_F(NetUcxWrites, SourcesAreGivenBackWhenAllEarlierWritesAreOver) {
  const auto take_done = [this] {
    std::vector<std::uint64_t> done;
    connection_->take_done(&done);
    return done;
  };
  put_into_host(0);
  connection_->release(7);
  put_into_host(0);
  connection_->release(8);
  connection_->release(9);
  EXPECT_THAT(take_names(), ElementsAre("put", "put")) << "no message asks the peer";
  EXPECT_THAT(take_done(), ElementsAre());
  complete("put");
  EXPECT_THAT(take_done(), ElementsAre(7));
  put_into_host(0);
  complete("put");
  EXPECT_THAT(take_done(), ElementsAre(8, 9)) << "later writes have other sources";
  complete("put");
  connection_->release(10);
  EXPECT_THAT(take_done(), ElementsAre(10)) << "nothing is under way";
}

/// A connection to a peer whose GPU memory is probed.
class NetUcxProbe : public NetUcxNoted {
 protected:
  NetUcxProbe() { is_probed_ = true; }

  /// Lets the probe read this word of the peer's memory.
  void probe_reads(std::uint64_t word) {
    ASSERT_EQ(notes_.in_flight.back().what, "get");
    std::memcpy(notes_.in_flight.back().into, &word, sizeof word);
    complete("get");
  }
};

TEST_F(NetUcxProbe, TheHelloLeavesOnceWrittenBytesAreReadBack) {
  ASSERT_TRUE(open(false).ok());
  connection_->greet();
  EXPECT_THAT(take_names(), ElementsAre("put", "put", "flush"));
  EXPECT_EQ(notes_.in_flight[0].params.memory_type, UCS_MEMORY_TYPE_HOST);
  EXPECT_EQ(notes_.in_flight[1].params.memory_type, UCS_MEMORY_TYPE_CUDA);
  EXPECT_EQ(notes_.in_flight[0].remote, kGpuBase + gpu_memory_.size() - net::gpu_probe_bytes(2));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  EXPECT_TRUE(connection_->is_probing());
  probe_reads(kProbeWord);
  EXPECT_FALSE(connection_->is_probing());
  EXPECT_THAT(take_names(), ElementsAre("message"));
  EXPECT_EQ(connection_->failure(), UCS_OK);
}

TEST_F(NetUcxProbe, IsReadOnceItsWritesAreReadBack) {
  ASSERT_TRUE(open(true).ok());
  connection_->greet();
  EXPECT_THAT(take_names(), ElementsAre("put", "put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  complete("get");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  probe_reads(kProbeWord);
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxProbe, NotifiesWaitForTheHelloOfThePeer) {
  ASSERT_TRUE(open(false).ok());
  connection_->greet();
  notify(0);
  EXPECT_FALSE(connection_->put_notify({.kind = net::ucx::MessageKind::kPutNotify}, 0, 8));
  EXPECT_THAT(take_names(), ElementsAre("put", "put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  probe_reads(kProbeWord);
  EXPECT_THAT(take_names(), ElementsAre("message"));
  EXPECT_THAT(take_names(), ElementsAre());
  connection_->greeted();
  EXPECT_THAT(take_names(), ElementsAre("message"));
}

TEST_F(NetUcxProbe, OtherBytesThanWereWrittenAreAFailureThatSaysWhatToDo) {
  ASSERT_TRUE(open(false).ok());
  connection_->greet();
  EXPECT_THAT(take_names(), ElementsAre("put", "put", "flush"));
  complete("flush");
  EXPECT_THAT(take_names(), ElementsAre("get"));
  probe_reads(kProbeWord + 1);
  EXPECT_THAT(take_names(), ElementsAre());
  EXPECT_NE(connection_->failure(), UCS_OK);
  const Status status = connection_->probe_failure();
  EXPECT_EQ(status.code(), ErrorCode::kUnsupported);
  EXPECT_EQ(status.peer(), 1);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("GPU memory of rank 1"), HasSubstr("rc_mlx5/mlx5_0"),
                    HasSubstr("other bytes were read back"), HasSubstr("GroupOptions::ring_memory")));
}

}  // namespace
}  // namespace ferry::test
