#ifndef FERRY_NET_DEVICES_HPP
#define FERRY_NET_DEVICES_HPP

/// Network devices of this host (listed by ferry::net_devices) and the interfaces that routes lead through. Addresses
/// are numeric text in getnameinfo's format, for example "192.0.2.1" or "fe80::1%eth0".

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::net {

/// Link layers of ports, as /sys/class/infiniband/*/ports/*/link_layer shows them.
inline constexpr std::string_view kInfiniBand = "InfiniBand";
inline constexpr std::string_view kEthernet = "Ethernet";

/// Ports of the RDMA cards that the kernel lists under `root`, with UCX's names for them: "mlx5_0:1".
std::vector<NetDeviceInfo> rdma_ports(const std::filesystem::path& root = "/sys/class/infiniband");

/// Interface that has this address; empty if there is none.
std::string interface_of(std::string_view address, std::span<const NetDeviceInfo> devices);

/// Source address of this host for packets to `address`; empty if `address` is not an address or has no route. Sends no
/// packet.
std::string source_towards(const std::string& address);

/// Address of this host for destinations without a specific route: that of the interface with the default route, else
/// of the first usable interface other than loopback; empty if there is none.
std::string default_address(std::span<const NetDeviceInfo> devices);

/// False if the text is not an address.
bool is_loopback_address(const std::string& address);

/// Device list for error texts: "eth0 (192.0.2.2), lo (127.0.0.1), mlx5_0:1".
std::string describe(std::span<const NetDeviceInfo> devices);

/// Usable devices that a list such as "eth0, mlx5_0" names; names of other devices are ignored.
std::vector<NetDeviceInfo> devices_named(std::string_view list, std::span<const NetDeviceInfo> devices);

/// Device names of such a list in the form that engines take: "eth0,mlx5_0:1". A card named without a
/// port means all its ports; "all" is returned unchanged.
/// @errors kInvalidArgument: the list is empty, or names a device that does not exist or cannot be used
Result<std::string> check_devices(std::string_view list, std::span<const NetDeviceInfo> devices);

}  // namespace ferry::net

#endif  // FERRY_NET_DEVICES_HPP
