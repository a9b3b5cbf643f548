#include "ucx_card/hosts.hpp"

#include <cstdint>
#include <vector>

#include "core/host_identity.hpp"
#include "ferry/transports.hpp"
#include "net/gpu_direct.hpp"

namespace ferry::test {
namespace {

thread_local int host_of_thread = 0;

}  // namespace

void enter_host(int host) { host_of_thread = host; }

// The names under which the linker's option --wrap finds a function and what replaces it.
HostIdentity real_host() __asm__("__real__ZN5ferry9this_hostEv");
HostIdentity host_seen() __asm__("__wrap__ZN5ferry9this_hostEv");
std::vector<NetDeviceInfo> real_devices() __asm__("__real__ZN5ferry11net_devicesEv");
std::vector<NetDeviceInfo> devices_seen() __asm__("__wrap__ZN5ferry11net_devicesEv");

GpuDirectFact driver_seen(bool has_dma_buf, const std::filesystem::path& modules) __asm__(
    "__wrap__ZN5ferry3net11driver_factEbRKNSt10filesystem7__cxx114pathE");

/// The stand-in asks nothing of the driver that a virtual GPU lacks.
GpuDirectFact driver_seen(bool /*has_dma_buf*/, const std::filesystem::path& /*modules*/) {
  return {"driver", true, "a stand-in for a card", ""};
}

HostIdentity host_seen() {
  HostIdentity identity = real_host();
  identity.network_namespace += static_cast<std::uint64_t>(host_of_thread);
  return identity;
}

std::vector<NetDeviceInfo> devices_seen() {
  std::vector<NetDeviceInfo> devices = real_devices();
  devices.push_back({.name = "mlx5_0:1", .rdma = true, .usable = true});
  return devices;
}

}  // namespace ferry::test
