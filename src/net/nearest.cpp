#include "net/nearest.hpp"

#include <algorithm>
#include <compare>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

#include "net/sysfs.hpp"

namespace ferry::net {
namespace {

/// Location of a device: its real path under /sys/devices, which names every bridge above it.
struct Place {
  std::vector<std::string> bridges;  ///< from the host bridge down; the last entry is the device itself
  int numa_node = -1;                ///< -1: not known
};

std::optional<Place> place_of(const std::filesystem::path& link, const std::filesystem::path& sys) {
  std::error_code error;
  const std::filesystem::path device = std::filesystem::canonical(link, error);
  if (error) return std::nullopt;
  const std::filesystem::path root = std::filesystem::canonical(sys / "devices", error);
  if (error) return std::nullopt;
  Place place;
  for (const std::filesystem::path& part : device.lexically_relative(root)) place.bridges.push_back(part.string());
  place.numa_node = number_in(device / "numa_node");
  return place;
}

/// Greater is nearer: number of common bridges, then the same NUMA node.
struct Nearness {
  std::ptrdiff_t num_common = 0;
  bool same_numa_node = false;
  auto operator<=>(const Nearness& other) const = default;
};

Nearness nearness(const Place& a, const Place& b) {
  const auto common = std::ranges::mismatch(a.bridges, b.bridges).in1 - a.bridges.begin();
  // Below one host bridge the node is always the same, and the kernel may not report it.
  return {common, common == 0 && a.numa_node >= 0 && a.numa_node == b.numa_node};
}

}  // namespace

std::vector<std::string> nearest_ports(std::string_view pci_address, std::span<const NetDeviceInfo> devices,
                                       const std::filesystem::path& sys) {
  if (pci_address.empty()) return {};
  const std::optional<Place> gpu = place_of(pci_device(pci_address, sys), sys);
  if (!gpu) return {};
  std::vector<std::string> ports;
  Nearness best;
  for (const NetDeviceInfo& device : devices) {
    if (!device.rdma || !device.usable) continue;
    const std::string card = device.name.substr(0, device.name.rfind(':'));
    const std::optional<Place> place = place_of(sys / "class/infiniband" / card / "device", sys);
    const Nearness one = place ? nearness(*gpu, *place) : Nearness{};
    if (one < best) continue;
    if (best < one) ports.clear();
    best = one;
    ports.push_back(device.name);
  }
  return best == Nearness{} ? std::vector<std::string>() : ports;
}

}  // namespace ferry::net
