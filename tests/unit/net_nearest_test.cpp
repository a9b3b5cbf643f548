/// Network card that a rank uses for its GPU, on hosts that are trees of files.

#include "net/nearest.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/rank_place.hpp"
#include "net/devices.hpp"
#include "rail/net_devices.hpp"
#include "rail/port_choice.hpp"
#include "rail/ring_memory.hpp"

namespace ferry::net {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// /sys of a host: devices at their real paths, found through the links of their classes.
class FakeHost {
 public:
  FakeHost() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ferry-test-XXXXXX").string();
    sys_ = mkdtemp(pattern.data());
    std::filesystem::create_directories(sys_ / "devices");
    std::filesystem::create_directories(sys_ / "bus/pci/devices");
  }
  ~FakeHost() { std::filesystem::remove_all(sys_); }
  FakeHost(const FakeHost&) = delete;
  FakeHost& operator=(const FakeHost&) = delete;

  /// `place`: path below /sys/devices, whose last part is the PCI address.
  void add_gpu(const std::string& place, int numa_node = -1) { (void)add_device(place, numa_node); }
  void add_card(const std::string& name, const std::string& place, int numa_node = -1) {
    const std::filesystem::path device = add_device(place, numa_node);
    std::filesystem::create_directories(sys_ / "class/infiniband" / name);
    std::filesystem::create_directory_symlink(device, sys_ / "class/infiniband" / name / "device");
    ports_.push_back({.name = name + ":1", .rdma = true, .usable = true});
  }
  std::vector<NetDeviceInfo>& ports() { return ports_; }
  const std::filesystem::path& sys() const { return sys_; }
  std::vector<std::string> nearest(const std::string& gpu) const { return nearest_ports(gpu, ports_, sys_); }

 private:
  std::filesystem::path add_device(const std::string& place, int numa_node) {
    const std::filesystem::path device = sys_ / "devices" / place;
    std::filesystem::create_directories(device);
    std::ofstream(device / "numa_node") << numa_node << "\n";
    std::filesystem::create_directory_symlink(device, sys_ / "bus/pci/devices" / device.filename());
    return device;
  }

  std::filesystem::path sys_;
  std::vector<NetDeviceInfo> ports_;
};

/// Two sockets: on the first each GPU shares a switch with a card; on the second two cards are beside the GPUs' bridge.
class TwoSockets : public ::testing::Test {
 protected:
  TwoSockets() {
    host_.add_gpu("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1b:00.0", 0);
    host_.add_gpu("pci0000:17/0000:17:03.0/0000:2a:00.0/0000:2b:00.0/0000:2c:00.0", 0);
    host_.add_gpu("pci0000:97/0000:97:01.0/0000:98:00.0", 1);
    host_.add_gpu("pci0000:c0/0000:c0:01.0/0000:c1:00.0", 1);
    host_.add_card("mlx5_0", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0/0000:1a:00.0", 0);
    host_.add_card("mlx5_1", "pci0000:17/0000:17:03.0/0000:2a:00.0/0000:2b:01.0/0000:2d:00.0", 0);
    host_.add_card("mlx5_2", "pci0000:97/0000:97:02.0/0000:99:00.0", 1);
    host_.add_card("mlx5_3", "pci0000:97/0000:97:03.0/0000:9a:00.0", 1);
    host_.ports().push_back({.name = "eth0", .addresses = {"192.0.2.1"}, .usable = true});
  }
  FakeHost host_;
};

TEST_F(TwoSockets, TheCardBelowTheSameSwitchIsNearest) {
  EXPECT_THAT(host_.nearest("0000:1b:00.0"), ElementsAre("mlx5_0:1"));
  EXPECT_THAT(host_.nearest("0000:2C:00.0"), ElementsAre("mlx5_1:1"));
}

TEST_F(TwoSockets, EquallyNearCardsAreAllOfThem) {
  EXPECT_THAT(host_.nearest("0000:98:00.0"), ElementsAre("mlx5_2:1", "mlx5_3:1"));
}

TEST_F(TwoSockets, WithoutACommonBridgeTheNumaNodeDecides) {
  EXPECT_THAT(host_.nearest("0000:c1:00.0"), ElementsAre("mlx5_2:1", "mlx5_3:1"));
}

TEST_F(TwoSockets, APortThatIsNotActiveIsPassedOver) {
  host_.ports()[0].usable = false;
  EXPECT_THAT(host_.nearest("0000:1b:00.0"), ElementsAre("mlx5_1:1"));
}

TEST_F(TwoSockets, ASlowPortBelowTheSameSwitchIsPassedOver) {
  for (const char* name : {"UCX_NET_DEVICES", rail::kNetDevicesVariable}) unsetenv(name);
  host_.add_card("mlx5_4", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:02.0/0000:1e:00.0", 0);
  host_.add_card("mlx5_5", "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:03.0/0000:1f:00.0", 0);
  for (NetDeviceInfo& device : host_.ports()) {
    if (device.rdma) device.link_layer = kInfiniBand;
    if (device.rdma) device.rate_gbps = 400;
    if (device.name == "mlx5_0:1") device.rate_gbps = 100;
    if (device.name == "mlx5_5:1") device.link_layer = kEthernet;
  }
  const std::vector<RankPlace> places{{.address = "192.0.2.1", .rates = rail::layer_rates(host_.ports())}};
  const auto choice = rail::choose_net_devices({.engine_variable = "UCX_NET_DEVICES",
                                                .bootstrap_address = "192.0.2.1",
                                                .places = places,
                                                .gpu_pci_address = "0000:1b:00.0",
                                                .rail = 1,
                                                .sys = host_.sys()},
                                               host_.ports());
  EXPECT_EQ(choice->devices, "mlx5_4:1,eth0");
}

TEST_F(TwoSockets, WhatTheSystemDoesNotTellIsNotGuessed) {
  EXPECT_THAT(host_.nearest(""), IsEmpty());
  EXPECT_THAT(host_.nearest("0000:77:00.0"), IsEmpty());
  FakeHost bare;
  bare.add_gpu("pci0000:17/0000:1b:00.0");
  bare.add_card("mlx5_0", "pci0000:97/0000:9a:00.0");
  EXPECT_THAT(bare.nearest("0000:1b:00.0"), IsEmpty());
}

TEST_F(TwoSockets, RanksOfANodeShareOutEquallyNearCards) {
  for (const char* name : {"UCX_NET_DEVICES", rail::kNetDevicesVariable}) unsetenv(name);
  const std::array<RankPlace, 2> places{RankPlace{.in_this_network = true, .address = "192.0.2.1"}, RankPlace{}};
  const auto choice_of = [&](const std::string& gpu, int rail) {
    return rail::choose_net_devices({.engine_variable = "UCX_NET_DEVICES",
                                     .bootstrap_address = "192.0.2.1",
                                     .places = places,
                                     .gpu_pci_address = gpu,
                                     .rail = rail,
                                     .sys = host_.sys()},
                                    host_.ports());
  };
  EXPECT_EQ(choice_of("0000:98:00.0", 2)->devices, "mlx5_2:1,eth0");
  EXPECT_EQ(choice_of("0000:98:00.0", 3)->devices, "mlx5_3:1,eth0");
  EXPECT_THAT(choice_of("0000:98:00.0", 3)->reason, HasSubstr("mlx5_3:1 is one of 2 nearest"));
  EXPECT_EQ(choice_of("0000:1b:00.0", 3)->devices, "mlx5_0:1,eth0");
  // Ranks without a GPU use every card.
  EXPECT_EQ(choice_of("", 3)->devices, "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,eth0");
}

/// Ranks propose rings in GPU memory where a card is near, and look at the GPU only there.
TEST_F(TwoSockets, RingsInGpuMemoryAreProposedForANearCard) {
  int num_examined = 0;
  const auto say = [&](const std::string& gpu, const char* named, const char* transport = "ucx") {
    const rail::GpuSide side{gpu, [&num_examined] {
                               ++num_examined;
                               return rail::GpuPart{{"gpu", false, "a GPU of a sandbox", ""}, false};
                             }};
    return rail::propose_gpu_rings(side, transport, named, host_.ports(), host_.sys());
  };
  EXPECT_EQ(say("0000:1b:00.0", "", "loopback"), RingProposal::kNoTransport);
  EXPECT_EQ(say("0000:1b:00.0", "eth0"), RingProposal::kNoCard) << "an interface alone leaves the cards out";
  EXPECT_EQ(say("", ""), RingProposal::kFarCard) << "the driver does not tell where the GPU is";
  EXPECT_EQ(say("0000:1b:00.0", "mlx5_2:1"), RingProposal::kFarCard) << "the card of the other socket";
  EXPECT_EQ(num_examined, 0);
  EXPECT_EQ(say("0000:1b:00.0", ""), RingProposal::kNoGpu);
  EXPECT_EQ(say("0000:c1:00.0", "mlx5_3"), RingProposal::kNoGpu) << "of the same NUMA node";
  EXPECT_EQ(num_examined, 2);
}

TEST(RingProposals, OfAllRanksAreNeeded) {
  std::vector<RankPlace> places(3, {.ring_proposal = RingProposal::kProposed});
  EXPECT_EQ(rail::why_host_memory(places), "");
  places[2].ring_proposal = RingProposal::kFarCard;
  EXPECT_EQ(rail::why_host_memory(places), "rank 2 has no RDMA card near its GPU");
  places[1].ring_proposal = RingProposal::kNoCard;
  EXPECT_EQ(rail::why_host_memory(places), "rank 1 has no RDMA card with an active port");
  places.assign(2, {.on_this_host = true, .ring_proposal = RingProposal::kProposed});
  EXPECT_EQ(rail::why_host_memory(places), "all ranks share a host");
}

}  // namespace
}  // namespace ferry::net
