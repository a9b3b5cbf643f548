/// Ports of network cards that ranks use: the fastest ones of a link layer that all ranks have.

#include "rail/port_choice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/backend_context.hpp"
#include "net/devices.hpp"
#include "node/rendezvous.hpp"
#include "rail/net_devices.hpp"
#include "support/rank_runner.hpp"

namespace ferry::rail {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kEngine = "UCX_NET_DEVICES";

NetDeviceInfo port(const std::string& name, std::string_view layer, int rate) {
  return {.name = name, .rdma = true, .usable = true, .link_layer = std::string(layer), .rate_gbps = rate};
}

/// A host with two ports for each use: InfiniBand between GPUs, Ethernet for storage, and a slow management port.
std::vector<NetDeviceInfo> mixed_host() {
  return {{.name = "eth0", .addresses = {"192.0.2.1"}, .usable = true},
          port("mlx5_0:1", net::kInfiniBand, 400),
          port("mlx5_1:1", net::kEthernet, 200),
          port("mlx5_2:1", net::kInfiniBand, 100),
          port("mlx5_3:1", net::kInfiniBand, 400),
          port("mlx5_4:1", net::kEthernet, 25)};
}

class PortChoiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv(kEngine);
    unsetenv(kNetDevicesVariable);
  }
  void TearDown() override { SetUp(); }

  /// Choice of a rank with these devices in a group with another rank, whose ports have these rates.
  static Result<NetDeviceChoice> choose(const std::vector<NetDeviceInfo>& devices, LayerRates other) {
    const std::vector<RankPlace> places{{.rates = rates_to_publish("", kEngine, devices)}, {.rates = other}};
    return choose_net_devices({.engine_variable = kEngine, .bootstrap_address = "192.0.2.1", .places = places},
                              devices);
  }
};

TEST_F(PortChoiceTest, TakesTheFastestPortsOfOneLayer) {
  const Result<NetDeviceChoice> choice = choose(mixed_host(), {.infiniband = 800, .ethernet = 200});
  EXPECT_EQ(choice->devices, "mlx5_0:1,mlx5_3:1,eth0");
  EXPECT_THAT(choice->reason, HasSubstr("mlx5_1:1 is not taken (Ethernet, ranks use InfiniBand)"));
  EXPECT_THAT(choice->reason, HasSubstr("mlx5_2:1 is not taken (100 Gb/s, others have 400)"));
}

TEST_F(PortChoiceTest, TakesTheLayerThatAllRanksHave) {
  EXPECT_EQ(choose(mixed_host(), {.ethernet = 200})->devices, "mlx5_1:1,eth0");
  EXPECT_EQ(choose(mixed_host(), {.infiniband = 100})->devices, "mlx5_0:1,mlx5_3:1,eth0");
  // The slower rank decides how fast a layer is.
  EXPECT_EQ(choose(mixed_host(), {.infiniband = 100, .ethernet = 3200})->devices, "mlx5_1:1,eth0");
}

TEST_F(PortChoiceTest, RanksWithoutCardsHaveNoSay) {
  EXPECT_EQ(choose(mixed_host(), {})->devices, "mlx5_0:1,mlx5_3:1,eth0");
  EXPECT_EQ(choose({mixed_host().front()}, {.infiniband = 400})->devices, "eth0");
}

TEST_F(PortChoiceTest, ManyPortsOutweighOneThatIsAsFast) {
  std::vector<NetDeviceInfo> devices{{.name = "eth0", .addresses = {"192.0.2.1"}, .usable = true},
                                     port("mlx5_0:1", net::kInfiniBand, 400),
                                     port("mlx5_1:1", net::kEthernet, 400)};
  EXPECT_EQ(choose(devices, {})->devices, "mlx5_0:1,eth0");
  devices.push_back(port("mlx5_2:1", net::kEthernet, 400));
  EXPECT_EQ(choose(devices, {})->devices, "mlx5_1:1,mlx5_2:1,eth0");
}

TEST_F(PortChoiceTest, RefusesRanksWithoutACommonLayer) {
  const std::vector<NetDeviceInfo> devices{{.name = "eth0", .addresses = {"192.0.2.1"}, .usable = true},
                                           port("mlx5_0:1", net::kInfiniBand, 400)};
  const Result<NetDeviceChoice> choice = choose(devices, {.ethernet = 400});
  ASSERT_FALSE(choice.ok());
  EXPECT_EQ(choice.status().code(), ErrorCode::kUnsupported);
  EXPECT_EQ(choice.status().peer(), 1);
  EXPECT_THAT(std::string(choice.status().message()), HasSubstr("InfiniBand at rank 0 and Ethernet (RoCE) at rank 1"));
  EXPECT_THAT(std::string(choice.status().message()), HasSubstr("FERRY_NET_DEVICES"));
  // The remedy that it names.
  setenv(kNetDevicesVariable, "eth0", 1);
  EXPECT_EQ(choose(devices, {.ethernet = 400})->devices, "eth0");
}

TEST_F(PortChoiceTest, KeepsPortsOfWhichNothingIsKnown) {
  std::vector<NetDeviceInfo> devices = mixed_host();
  devices.push_back(port("efa_0:1", "", 0));
  devices.push_back(port("mlx5_5:1", net::kInfiniBand, 0));
  EXPECT_EQ(choose(devices, {})->devices, "mlx5_0:1,mlx5_3:1,efa_0:1,mlx5_5:1,eth0");
  EXPECT_EQ(choose({mixed_host().front(), port("mlx5_0:1", "", 0), port("mlx5_1:1", "", 0)}, {})->devices,
            "mlx5_0:1,mlx5_1:1,eth0");
}

TEST_F(PortChoiceTest, PortsThatAreNotActiveDoNotCount) {
  std::vector<NetDeviceInfo> devices = mixed_host();
  devices[1].usable = false;
  devices[4].usable = false;
  const Result<NetDeviceChoice> choice = choose(devices, {});
  EXPECT_EQ(choice->devices, "mlx5_1:1,eth0");
  EXPECT_THAT(choice->reason, Not(HasSubstr("mlx5_0:1")));
}

TEST_F(PortChoiceTest, ARankThatNamesDevicesPublishesTheirRates) {
  const auto rates = [](std::string_view wanted) { return rates_to_publish(wanted, kEngine, mixed_host()); };
  EXPECT_EQ(rates("").infiniband, 800);
  EXPECT_EQ(rates("").ethernet, 200);
  EXPECT_EQ(rates("all").infiniband, 800);
  EXPECT_EQ(rates("eth0, mlx5_4").infiniband, 0);
  EXPECT_EQ(rates("eth0, mlx5_4").ethernet, 25);
  EXPECT_EQ(rates("eth0").ethernet, 0);
  setenv(kNetDevicesVariable, "mlx5_2:1", 1);
  EXPECT_EQ(rates("").infiniband, 100);
  setenv(kEngine, "mlx5_1:1", 1);
  EXPECT_EQ(rates("mlx5_0:1").infiniband, 0);
  EXPECT_EQ(rates("mlx5_0:1").ethernet, 200);
}

TEST_F(PortChoiceTest, RanksLearnEachOthersRates) {
  test::run_ranks({.kind = test::RankKind::kThreads, .num_ranks = 2}, [](test::RankContext& context) {
    const std::shared_ptr<Bootstrap> bootstrap = context.bootstrap();
    BackendContext backend;
    backend.bootstrap = bootstrap.get();
    backend.topology = {context.rank(), 2, 1};
    backend.options.arena_bytes = std::size_t{1} << 20;
    backend.options.timeout_ns = 20 * kNsPerSecond;
    const RankPlace mine{.address = "192.0.2.1",
                         .rates = {.infiniband = 100 + context.rank(), .ethernet = 200 + context.rank()}};
    const Result<node::Rendezvous> met = node::rendezvous(backend, mine, {});
    throw_if_error(met.status());
    for (int rank = 0; rank < 2; ++rank) {
      const LayerRates& rates = met->places[static_cast<std::size_t>(rank)].rates;
      context.expect(rates.infiniband == 100 + rank && rates.ethernet == 200 + rank, "rates of a rank");
    }
    throw_if_error(bootstrap->all_gather({}, 20 * kNsPerSecond).status());
  });
}

}  // namespace
}  // namespace ferry::rail
