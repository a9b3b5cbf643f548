#ifndef FERRY_NET_NEAREST_HPP
#define FERRY_NET_NEAREST_HPP

/// Which RDMA ports are nearest to a GPU, by the tree of PCI bridges that the kernel shows.

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/transports.hpp"

namespace ferry::net {

/// Names of the usable ports, in the order of `devices`, whose card shares the most bridges with the PCI device at
/// `pci_address` ("0000:1b:00.0", in any case); of those that share none, the ports of its NUMA node. Empty where the
/// system does not tell: no such device, or no card is nearer than another because their places are not known.
std::vector<std::string> nearest_ports(std::string_view pci_address, std::span<const NetDeviceInfo> devices,
                                       const std::filesystem::path& sys = "/sys");

}  // namespace ferry::net

#endif  // FERRY_NET_NEAREST_HPP
