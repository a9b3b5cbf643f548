#ifndef FERRY_NET_NEAREST_HPP
#define FERRY_NET_NEAREST_HPP

/// RDMA ports nearest to a GPU, by the tree of PCI bridges that the kernel shows.

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/transports.hpp"

namespace ferry::net {

/// Names of the usable ports, in the order of `devices`, whose card shares the most bridges with the PCI device at
/// `pci_address` ("0000:1b:00.0", in either case); if no card shares a bridge, the ports of the device's NUMA node.
/// Empty if there is no such device, or if unknown locations make all cards equally near.
std::vector<std::string> nearest_ports(std::string_view pci_address, std::span<const NetDeviceInfo> devices,
                                       const std::filesystem::path& sys = "/sys");

}  // namespace ferry::net

#endif  // FERRY_NET_NEAREST_HPP
