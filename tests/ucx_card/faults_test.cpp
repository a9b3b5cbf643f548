/// Failures of a card, one at a time: each is an error that names the peer, and no notify arrives whose bytes do not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ucs/type/status.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "support/net_ends.hpp"
#include "ucx_card/variable.hpp"

namespace ferry::test {
namespace {

using testing::HasSubstr;

Status create_status(std::size_t gpu_bytes) {
  std::vector<std::byte> memory(4096);
  std::vector<std::byte> gpu_memory(gpu_bytes);
  net::EngineOptions options{.num_peers = 2, .memory = memory, .gpu_memory = gpu_memory};
  return net_engine("ucx").create(options).status();
}

struct CreateFault {
  const char* call;
  const char* words;
};

class UcxCardCreate : public testing::TestWithParam<CreateFault> {};

TEST_P(UcxCardCreate, AFailureIsATypedErrorThatSaysWhatFailed) {
  const CardSettings settings(std::string("status=4,fail=") + GetParam().call);
  const Status status = create_status(4096);
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().words));
  EXPECT_THAT(std::string(status.message()), HasSubstr("Out of memory"));
  const CardSettings sound("");
  EXPECT_TRUE(create_status(4096).ok()) << "nothing is left of the failure";
}

INSTANTIATE_TEST_SUITE_P(, UcxCardCreate,
                         testing::Values(CreateFault{"init", "opening a context"},
                                         CreateFault{"map", "registering memory"},
                                         CreateFault{"map_gpu", "registering GPU memory"},
                                         CreateFault{"pack", "packing the memory's key"},
                                         CreateFault{"worker", "opening a worker"}),
                         [](const auto& instance) { return std::string(instance.param.call); });

TEST(UcxCardFaults, GpuMemoryThatTheLibraryDoesNotKnowIsRefused) {
  const Variable transports("UCX_TLS", "rc");
  const Status status = create_status(4096);
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_THAT(std::string(status.message()), HasSubstr("GroupOptions::ring_memory"));
}

class UcxCardConnect : public testing::TestWithParam<CreateFault> {};

TEST_P(UcxCardConnect, AFailureNamesThePeer) {
  const CardSettings settings(std::string("status=6,end=0,fail_at=2,fail=") + GetParam().call);
  NetEnds ends("ucx", {.num_ends = 3, .timeout_ns = 100'000'000});
  ends[0].options.ranks = {10, 11, 12};
  const Status status = ends.connect(0, ends.addresses());
  EXPECT_EQ(status.code(), ErrorCode::kTransport) << status.to_string();
  EXPECT_EQ(status.peer(), 2);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().words));
}

INSTANTIATE_TEST_SUITE_P(, UcxCardConnect,
                         testing::Values(CreateFault{"endpoint", "connecting to rank 2"},
                                         CreateFault{"unpack", "reading the key to the memory of rank 2"}),
                         [](const auto& instance) { return std::string(instance.param.call); });

struct OperationFault {
  const char* call;
  int status;
  int at;
  bool now = false;
  bool read_back = false;
};

std::string fault_name(const testing::TestParamInfo<OperationFault>& info) {
  return std::string(info.param.call) + "_" + std::to_string(info.param.at) + "_status_" +
         std::to_string(info.param.status) + (info.param.now ? "_now" : "") +
         (info.param.read_back ? "_read_back" : "");
}

std::vector<OperationFault> operation_faults() {
  std::vector<OperationFault> faults;
  for (const char* call : {"put", "flush", "message"}) {
    for (const ucs_status_t status : {UCS_ERR_IO_ERROR, UCS_ERR_NO_MEMORY, UCS_ERR_CANCELED, UCS_ERR_CONNECTION_RESET,
                                      UCS_ERR_ENDPOINT_TIMEOUT, UCS_ERR_NO_RESOURCE}) {
      for (const bool now : {false, true}) faults.push_back({call, -status, 5, now});
    }
  }
  faults.push_back({"put", -UCS_ERR_IO_ERROR, 1});
  faults.push_back({"flush", -UCS_ERR_IO_ERROR, 1});
  // Behind the four of the probes.
  for (const bool now : {false, true}) faults.push_back({"get", -UCS_ERR_IO_ERROR, 6, now, true});
  return faults;
}

class UcxCardFault : public testing::TestWithParam<OperationFault> {};

/// Ends 0 and 1 exchange in rounds until the card of end 0 fails; end 2 talks to both.
TEST_P(UcxCardFault, LosesOnePeerAndNoNotifyIsWrong) {
  const OperationFault& fault = GetParam();
  const CardSettings settings("latency_ns=100000,piece_bytes=64,end=0,fail=" + std::string(fault.call) +
                              ",fail_at=" + std::to_string(fault.at) + ",status=" + std::to_string(fault.status) +
                              (fault.now ? ",now=1" : "") + (fault.read_back ? ",gpu_lag=1" : ""));
  constexpr std::size_t kPart = 2000;
  NetEnds ends("ucx", {.num_ends = 3,
                       .memory_bytes = 8 * kPart,
                       .gpu_bytes = fault.read_back ? 8 * kPart : 0,
                       .read_back_gpu_writes = fault.read_back});
  ends.connect();
  int num_wrong = 0;
  const auto memory_of = [&](int end) { return fault.read_back ? ends[end].gpu : ends[end].memory; };
  // Each end writes into its own part of the others' memory, from the parts behind.
  for (int end = 0; end < 3; ++end) {
    ends[end].on_notified = [&, end](int peer, int, std::uint64_t value) {
      const auto from = static_cast<std::size_t>(peer);
      const auto part = memory_of(end).subspan(from * kPart, kPart);
      const std::vector<std::byte> seen(part.begin(), part.end());  // to make the pattern takes long
      if (seen != net_pattern(kPart, value * 3 + from)) ++num_wrong;
    };
  }
  const std::size_t base = fault.read_back ? net::kGpuOffset : 0;
  const auto send = [&](int from, int to, std::uint64_t round) {
    const auto index = static_cast<std::size_t>(from);
    const std::size_t source = (3 + static_cast<std::size_t>(to)) * kPart;
    std::ranges::copy(net_pattern(kPart, round * 3 + index), memory_of(from).subspan(source).begin());
    ends[from].engine->put(to, 0, base + source, base + index * kPart, kPart);
    ends[from].engine->notify(to, 0, round);
  };
  for (std::uint64_t round = 1; round <= 20; ++round) {
    for (int from = 0; from < 3; ++from) {
      for (int to = 0; to < 3; ++to) {
        if (to != from) send(from, to, round);
      }
    }
    // Each pair has exchanged this round, or is lost.
    const auto settled = [&](int from, int to) {
      return ends[to].highest(from, 0) == round || ends[to].lost.contains(from);
    };
    ASSERT_TRUE(ends.poll_until([&] {
      for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
          if (to != from && !settled(from, to)) return false;
        }
      }
      return true;
    })) << "round "
        << round;
  }
  EXPECT_EQ(num_wrong, 0);
  ASSERT_EQ(ends[0].lost.size(), 1U);
  const auto& [peer, why] = *ends[0].lost.begin();
  EXPECT_EQ(why.peer(), peer);
  EXPECT_THAT(std::string(why.message()), HasSubstr("the connection to rank " + std::to_string(peer)));
  const bool is_loss = fault.status == -UCS_ERR_CANCELED || fault.status == -UCS_ERR_CONNECTION_RESET ||
                       fault.status == -UCS_ERR_ENDPOINT_TIMEOUT;
  EXPECT_EQ(why.code(), is_loss ? ErrorCode::kPeerLost : ErrorCode::kTransport) << why.to_string();
  EXPECT_EQ(ends[0].num_lost_events, 1);
  // The peer loses end 0; nothing else is lost.
  EXPECT_EQ(ends[peer].lost.size(), 1U);
  EXPECT_TRUE(ends[peer].lost.contains(0));
  EXPECT_TRUE(ends[3 - peer].lost.empty());
}

INSTANTIATE_TEST_SUITE_P(, UcxCardFault, testing::ValuesIn(operation_faults()), fault_name);

/// Registration succeeds and puts fail: found before either end hears from the other.
TEST(UcxCardFaults, ACardThatCannotPutIntoGpuMemoryIsFoundWhileConnecting) {
  for (const char* when : {"fail_at=1,now=0", "fail_at=1,now=1", "fail_at=2,now=0", "fail_at=2,now=1"}) {
    const CardSettings settings(std::string("latency_ns=100000,end=0,fail=put_gpu,status=3,") + when);
    NetEnds ends("ucx", {.gpu_bytes = 4096});
    ends.connect();
    for (const int from : {0, 1}) ends[from].engine->notify(1 - from, 0, 1);
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(1) && ends[1].lost.contains(0); })) << when;
    EXPECT_EQ(ends[0].lost[1].code(), ErrorCode::kUnsupported) << ends[0].lost[1].to_string();
    EXPECT_EQ(ends[0].lost[1].peer(), 1);
    EXPECT_THAT(std::string(ends[0].lost[1].message()),
                testing::AllOf(HasSubstr("GPU memory of rank 1"), HasSubstr("rc_mlx5/mlx5_0"),
                               HasSubstr("Input/output error"), HasSubstr("GroupOptions::ring_memory")));
    EXPECT_TRUE(ends[0].heard.empty());
    EXPECT_TRUE(ends[1].heard.empty());
  }
}

TEST(UcxCardFaults, AGetThatFailsLosesThePeerAndIsNotReported) {
  for (const char* now : {"0", "1"}) {
    const CardSettings settings(std::string("latency_ns=100000,end=0,fail=get,status=3,now=") + now);
    NetEnds ends("ucx", {});
    ends.connect();
    std::vector<std::byte> got(1000);
    ends[0].engine->get(1, got, 0, 5);
    ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(1); }));
    EXPECT_EQ(ends[0].lost[1].code(), ErrorCode::kTransport);
    EXPECT_TRUE(ends[0].completed.empty());
  }
}

TEST(UcxCardFaults, AnEndWhoseEndpointsFailToCloseClosesByItsDeadline) {
  for (const char* now : {"0", "1"}) {
    const CardSettings settings(std::string("latency_ns=100000,fail=close,status=3,now=") + now);
    NetEnds ends("ucx", {});
    ends.connect();
    ends[0].engine->put(1, 0, 0, 0, 1000);
    ends[0].engine->notify(1, 0, 1);
    ends.close({0});
    ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
    EXPECT_EQ(ends[1].lost[0].code(), ErrorCode::kPeerLost);
    EXPECT_EQ(ends[1].highest(0, 0), 1U);
  }
}

TEST(UcxCardFaults, AnEndClosesWithoutEndpointsThatDoNot) {
  const CardSettings settings("close_latency_ns=600000000000");
  NetEnds ends("ucx", {});
  ends.connect();
  ends[0].engine->put(1, 0, 0, 0, 1000);
  ends[0].engine->notify(1, 0, 1);
  ends.close({0});
  ASSERT_TRUE(ends.poll_until([&] { return ends[1].lost.contains(0); }));
  EXPECT_EQ(ends[1].highest(0, 0), 1U);
}

TEST(UcxCardFaults, APutBehindTheEndOfThePeersMemoryIsAFailedConnection) {
  NetEnds ends("ucx", {.memory_bytes = 4096});
  ends.connect();
  ends[0].engine->put(1, 0, 0, 4000, 97);
  ASSERT_TRUE(ends.poll_until([&] { return ends[0].lost.contains(1); }));
  EXPECT_EQ(ends[0].lost[1].peer(), 1);
}

}  // namespace
}  // namespace ferry::test
