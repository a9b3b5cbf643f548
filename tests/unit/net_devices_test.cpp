/// Network devices of a host, the devices that a group uses, and the identity of a host.

#include "net/devices.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/host_identity.hpp"
#include "core/rank_place.hpp"
#include "rail/net_devices.hpp"

namespace ferry::net {
namespace {

using ::testing::HasSubstr;

constexpr const char* kEngineVariable = "UCX_NET_DEVICES";

/// A host with two networks and a card with two ports.
std::vector<NetDeviceInfo> two_networks() {
  return {{.name = "lo", .addresses = {"127.0.0.1", "::1"}, .loopback = true, .usable = true},
          {.name = "eth0", .addresses = {"192.0.2.1"}, .usable = true},
          {.name = "eth1", .addresses = {"198.51.100.1", "2001:db8::1"}, .usable = true},
          {.name = "eth2"},
          {.name = "eth3", .addresses = {"203.0.113.1"}}};
}

std::vector<NetDeviceInfo> with_cards() {
  std::vector<NetDeviceInfo> devices = two_networks();
  devices.push_back({.name = "mlx5_0:1", .rdma = true, .usable = true});
  devices.push_back({.name = "mlx5_0:2", .rdma = true});
  devices.push_back({.name = "mlx5_1:1", .rdma = true, .usable = true});
  return devices;
}

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ferry-test-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

TEST(NetDevices, ListsTheLoopbackInterfaceOfThisHost) {
  const std::vector<NetDeviceInfo> devices = net_devices();
  const std::string name = interface_of("127.0.0.1", devices);
  const auto loopback =
      std::find_if(devices.begin(), devices.end(), [&](const NetDeviceInfo& device) { return device.name == name; });
  ASSERT_NE(loopback, devices.end());
  EXPECT_TRUE(loopback->loopback);
  EXPECT_TRUE(loopback->usable);
  EXPECT_FALSE(loopback->rdma);
}

TEST(NetDevices, FindsTheAddressThatARouteLeavesFrom) {
  EXPECT_EQ(source_towards("127.0.0.1"), "127.0.0.1");
  for (const char* none : {"", "no address", "localhost", "300.1.1.1", "fe80::1%no-such-interface"}) {
    EXPECT_EQ(source_towards(none), "") << none;
  }
}

TEST(NetDevices, KnowsLoopbackAddresses) {
  for (const char* loopback : {"127.0.0.1", "127.0.1.1", "::1"}) EXPECT_TRUE(is_loopback_address(loopback)) << loopback;
  for (const char* other : {"192.0.2.1", "2001:db8::1", "", "lo"}) EXPECT_FALSE(is_loopback_address(other)) << other;
}

TEST(NetDevices, ListsThePortsOfCards) {
  const Folder root;
  EXPECT_TRUE(rdma_ports(root.path() / "absent").empty());
  for (const char* port : {"mlx5_0/ports/1", "mlx5_0/ports/2", "mlx5_1/ports/1"}) {
    std::filesystem::create_directories(root.path() / port);
  }
  std::ofstream(root.path() / "mlx5_0/ports/1/state") << "4: ACTIVE\n";
  std::ofstream(root.path() / "mlx5_0/ports/2/state") << "1: DOWN\n";
  const std::vector<NetDeviceInfo> ports = rdma_ports(root.path());
  ASSERT_EQ(ports.size(), 3U);
  EXPECT_EQ(ports[0].name, "mlx5_0:1");
  EXPECT_TRUE(ports[0].rdma && ports[0].usable);
  EXPECT_EQ(ports[1].name, "mlx5_0:2");
  EXPECT_FALSE(ports[1].usable);
  EXPECT_EQ(ports[2].name, "mlx5_1:1");
  EXPECT_FALSE(ports[2].usable);
  EXPECT_EQ(ports[0].link_layer, "");
  EXPECT_EQ(ports[0].rate_gbps, 0);
}

TEST(NetDevices, ReadsLayerAndRateOfPorts) {
  const Folder root;
  const auto port_with = [&](const std::string& layer, const std::string& rate) {
    const std::filesystem::path port = root.path() / "mlx5_0/ports/1";
    std::filesystem::create_directories(port);
    std::ofstream(port / "link_layer") << layer;
    std::ofstream(port / "rate") << rate;
    return rdma_ports(root.path()).at(0);
  };
  EXPECT_EQ(port_with("InfiniBand\n", "400 Gb/sec (4X NDR)\n").link_layer, "InfiniBand");
  EXPECT_EQ(port_with("InfiniBand\n", "400 Gb/sec (4X NDR)\n").rate_gbps, 400);
  EXPECT_EQ(port_with("Ethernet\n", "2.5 Gb/sec (1X SDR)\n").link_layer, "Ethernet");
  EXPECT_EQ(port_with("Ethernet\n", "2.5 Gb/sec (1X SDR)\n").rate_gbps, 2);
  for (const char* unknown : {"", "\n", "Unknown\n", "fast", "-1 Gb/sec", "99999999999 Gb/sec", "400"}) {
    EXPECT_EQ(port_with(unknown, unknown).link_layer, "") << unknown;
    EXPECT_EQ(port_with(unknown, unknown).rate_gbps, 0) << unknown;
  }
}

TEST(NetDevices, TakesNamesAsTheyAre) {
  const std::vector<NetDeviceInfo> devices = with_cards();
  EXPECT_EQ(check_devices("eth0", devices).value(), "eth0");
  EXPECT_EQ(check_devices(" eth1 ,mlx5_1:1", devices).value(), "eth1,mlx5_1:1");
  EXPECT_EQ(check_devices("mlx5_0", devices).value(), "mlx5_0:1");
  EXPECT_EQ(check_devices("all", devices).value(), "all");
}

TEST(NetDevices, RefusesNamesThatAreNone) {
  for (const char* list : {"", "eth9", "eth0,eth9", "eth", "eth0,", "mlx5_0:3", "mlx5", "eth0;eth1", "all,eth0"}) {
    const Result<std::string> names = check_devices(list, with_cards());
    ASSERT_FALSE(names.ok()) << list;
    EXPECT_EQ(names.status().code(), ErrorCode::kInvalidArgument) << list;
    EXPECT_THAT(std::string(names.status().message()), HasSubstr("no network device is called")) << list;
    EXPECT_THAT(
        std::string(names.status().message()),
        HasSubstr("this host has lo (127.0.0.1), eth0 (192.0.2.1), eth1 (198.51.100.1), eth2 (no address), eth3 "
                  "(down), mlx5_0:1, mlx5_0:2 (port not active), mlx5_1:1"))
        << list;
  }
  for (const char* unusable : {"eth2", "eth3", "mlx5_0:2"}) {
    EXPECT_THAT(std::string(check_devices(unusable, with_cards()).status().message()), HasSubstr("cannot use"))
        << unusable;
  }
}

TEST(HostIdentity, IsMachineNetworkAndSharedMemory) {
  const HostIdentity here = this_host();
  EXPECT_TRUE(here.same_network(this_host()));
  EXPECT_TRUE(here.same_host(this_host()));

  HostIdentity other_shm = here;
  ++other_shm.shm_inode;
  EXPECT_TRUE(here.same_network(other_shm));
  EXPECT_FALSE(here.same_host(other_shm));
  HostIdentity other_network = here;
  ++other_network.network_namespace;
  EXPECT_FALSE(here.same_network(other_network));
  EXPECT_FALSE(here.same_host(other_network));
  HostIdentity other_machine = here;
  ++other_machine.boot_id[0];
  EXPECT_FALSE(here.same_host(other_machine));
  // Two machines that cannot identify themselves.
  EXPECT_FALSE(HostIdentity{}.same_network(HostIdentity{}));
}

class Choice : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv(kEngineVariable);
    unsetenv(rail::kNetDevicesVariable);
  }
  void TearDown() override { SetUp(); }

  Result<NetDeviceChoice> choose(const std::string& wanted = "") const {
    return rail::choose_net_devices({.wanted = wanted,
                                     .engine_variable = kEngineVariable,
                                     .bootstrap_address = bootstrap_address,
                                     .places = places},
                                    devices);
  }

  std::vector<NetDeviceInfo> devices = two_networks();
  std::string bootstrap_address = "198.51.100.1";
  // Rank 0 on another host, this rank, and a rank beside it.
  std::vector<RankPlace> places{{.address = "127.0.0.2"},
                                {.on_this_host = true, .in_this_network = true},
                                {.on_this_host = true, .in_this_network = true}};
};

TEST_F(Choice, IsTheInterfaceOfTheBootstrap) { EXPECT_EQ(choose()->devices, "eth1"); }

TEST_F(Choice, IsTheSameInIPv6) {
  bootstrap_address = "2001:db8::1";
  EXPECT_EQ(choose()->devices, "eth1");
}

TEST_F(Choice, KeepsTheCards) {
  devices = with_cards();
  EXPECT_EQ(choose()->devices, "mlx5_0:1,mlx5_1:1,eth1");
}

TEST_F(Choice, IsWhereOthersReachRank0ForTheRanksBesideIt) {
  bootstrap_address = "127.0.0.1";
  places = {{.on_this_host = true, .in_this_network = true, .address = "192.0.2.1"},
            {.on_this_host = true, .in_this_network = true},
            {.address = "192.0.2.2"}};
  EXPECT_EQ(choose()->devices, "eth0");
}

TEST_F(Choice, IsTheRouteToRank0WhereTheBootstrapKnowsNone) {
  for (const char* unknown : {"", "127.0.0.1", "garbage"}) {
    bootstrap_address = unknown;
    EXPECT_EQ(choose()->devices, "lo") << unknown;  // 127.0.0.2 stands for the other host
  }
}

TEST_F(Choice, IsLoopbackWhereAllShareIt) {
  for (RankPlace& place : places) place.in_this_network = true;
  EXPECT_EQ(choose()->devices, "lo");
}

TEST_F(Choice, IsRefusedWhereNothingLeadsToOtherHosts) {
  devices = {};
  const Result<NetDeviceChoice> none = choose();
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), ErrorCode::kUnsupported);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("FERRY_NET_DEVICES"));
}

TEST_F(Choice, IsTheUsersOwnFirst) {
  devices = with_cards();
  setenv(rail::kNetDevicesVariable, "mlx5_1:1", 1);
  EXPECT_EQ(choose()->devices, "mlx5_1:1");
  EXPECT_EQ(choose("eth0")->devices, "eth0");
  setenv(kEngineVariable, "anything,at_all", 1);
  EXPECT_EQ(choose("eth0")->devices, "anything,at_all");
  EXPECT_EQ(choose("eth0")->reason, kEngineVariable);
}

TEST_F(Choice, SaysWhoNamedAWrongDevice) {
  EXPECT_THAT(std::string(choose("eth9").status().message()), HasSubstr("GroupOptions::net_devices is \"eth9\""));
  setenv(rail::kNetDevicesVariable, "eth9", 1);
  EXPECT_THAT(std::string(choose().status().message()), HasSubstr("FERRY_NET_DEVICES is \"eth9\""));
}

TEST_F(Choice, CanBeAskedForWithoutAGroup) {
  EXPECT_EQ(choose_net_devices("lo")->devices, "lo");
  EXPECT_EQ(choose_net_devices("no-such-device").status().code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace ferry::net
