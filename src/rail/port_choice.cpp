#include "rail/port_choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "net/devices.hpp"

namespace ferry::rail {
namespace {

bool is_usable_port(const NetDeviceInfo& device) { return device.rdma && device.usable; }

std::int32_t rate_of_layer(std::span<const NetDeviceInfo> devices, std::string_view layer) {
  std::int32_t best = 0;
  std::int32_t sum = 0;
  for (const NetDeviceInfo& device : devices) {
    if (!is_usable_port(device) || device.link_layer != layer) continue;
    const std::int32_t rate = std::max(device.rate_gbps, 1);
    if (rate > best) sum = 0;
    best = std::max(best, rate);
    if (rate == best) sum += rate;
  }
  return sum;
}

bool has_ports(const LayerRates& rates) { return rates.infiniband > 0 || rates.ethernet > 0; }

/// Names the first rank of each layer, so that all ranks report the same.
Status no_common_layer(std::span<const RankPlace> places) {
  const auto only_infiniband = std::ranges::find_if(
      places, [](const RankPlace& place) { return has_ports(place.rates) && place.rates.ethernet <= 0; });
  const auto only_ethernet = std::ranges::find_if(
      places, [](const RankPlace& place) { return has_ports(place.rates) && place.rates.infiniband <= 0; });
  const auto rank = only_ethernet - places.begin();
  return Status(ErrorCode::kUnsupported,
                fmt::format("active ports of network cards are InfiniBand at rank {} and Ethernet (RoCE) at rank {}, "
                            "which do not reach each other, expected one link layer that every host has; activate "
                            "ports of one layer on all hosts (`ferry doctor` shows them), or name the devices of every "
                            "rank in GroupOptions::net_devices or FERRY_NET_DEVICES (an interface such as eth0 leaves "
                            "cards out)",
                            only_infiniband - places.begin(), rank),
                static_cast<int>(rank));
}

}  // namespace

LayerRates layer_rates(std::span<const NetDeviceInfo> devices) {
  return {.infiniband = rate_of_layer(devices, net::kInfiniBand), .ethernet = rate_of_layer(devices, net::kEthernet)};
}

Result<std::string> common_layer(std::span<const RankPlace> places) {
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  LayerRates least{.infiniband = kMax, .ethernet = kMax};
  bool found = false;
  for (const RankPlace& place : places) {
    if (!has_ports(place.rates)) continue;
    found = true;
    least.infiniband = std::min(least.infiniband, place.rates.infiniband);
    least.ethernet = std::min(least.ethernet, place.rates.ethernet);
  }
  if (!found) return std::string();
  if (!has_ports(least)) return no_common_layer(places);
  return std::string(least.infiniband >= least.ethernet ? net::kInfiniBand : net::kEthernet);
}

PortChoice choose_ports(std::span<const NetDeviceInfo> devices, std::string_view layer) {
  const auto is_of_layer = [&](const NetDeviceInfo& port) {
    return layer.empty() || port.link_layer.empty() || port.link_layer == layer;
  };
  int best = 0;
  for (const NetDeviceInfo& device : devices) {
    if (is_usable_port(device) && is_of_layer(device)) best = std::max(best, device.rate_gbps);
  }
  PortChoice choice;
  const auto leave_out = [&](const NetDeviceInfo& port, const std::string& why) {
    choice.left_out += fmt::format("{}{} is not taken ({})", choice.left_out.empty() ? "" : ", ", port.name, why);
  };
  for (const NetDeviceInfo& device : devices) {
    if (!is_usable_port(device)) continue;
    if (!is_of_layer(device)) {
      leave_out(device, fmt::format("{}, ranks use {}", device.link_layer, layer));
    } else if (device.rate_gbps > 0 && device.rate_gbps < best) {
      leave_out(device, fmt::format("{} Gb/s, others have {}", device.rate_gbps, best));
    } else {
      choice.ports.push_back(device);
    }
  }
  return choice;
}

}  // namespace ferry::rail
