#ifndef FERRY_NET_DEVICES_HPP
#define FERRY_NET_DEVICES_HPP

/// The network devices of this host (listed by ferry::net_devices) and which of them lead where. Addresses are numeric
/// text as getnameinfo writes it, for example "192.0.2.1" or "fe80::1%eth0".

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::net {

/// Ports of the RDMA cards that the kernel lists under `root`, by the names that UCX gives them: "mlx5_0:1".
std::vector<NetDeviceInfo> rdma_ports(const std::filesystem::path& root = "/sys/class/infiniband");

/// The interface that has this address; empty if none has.
std::string interface_of(std::string_view address, std::span<const NetDeviceInfo> devices);

/// This host's address that packets to `address` leave from; empty if `address` is none, or no route leads there. Sends
/// nothing.
std::string source_towards(const std::string& address);

/// This host's address on the way to hosts that no route names: of the interface with the default route, else of the
/// first that works and is not loopback; empty if there is none.
std::string default_address(std::span<const NetDeviceInfo> devices);

/// False for anything that is not an address.
bool is_loopback_address(const std::string& address);

/// "eth0 (192.0.2.2), lo (127.0.0.1), mlx5_0:1".
std::string describe(std::span<const NetDeviceInfo> devices);

/// The names of a list such as "eth0, mlx5_0" as engines take them: "eth0,mlx5_0:1". A card without a port stands for
/// all its ports; "all" stays as it is.
/// @errors kInvalidArgument: the list is empty, or names a device that does not exist or cannot be used
Result<std::string> check_devices(std::string_view list, std::span<const NetDeviceInfo> devices);

}  // namespace ferry::net

#endif  // FERRY_NET_DEVICES_HPP
