#ifndef FERRY_RAIL_PORT_CHOICE_HPP
#define FERRY_RAIL_PORT_CHOICE_HPP

/// Choice among the ports of network cards: ports of one link layer, because cards of different layers do not reach
/// each other, and the fastest ones, because slower ports are for storage or management.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/rank_place.hpp"
#include "ferry/status.hpp"
#include "ferry/transports.hpp"

namespace ferry::rail {

/// Rates of the usable ports of these devices; a port whose rate is not known counts as 1 Gb/s.
LayerRates layer_rates(std::span<const NetDeviceInfo> devices);

/// Link layer that the ranks use: of the layers that every rank with ports has, the one whose slowest rank is fastest.
/// Ranks without ports of a known layer have no say. Empty: no rank has one.
/// @errors kUnsupported: no layer is common to the ranks
Result<std::string> common_layer(std::span<const RankPlace> places);

struct PortChoice {
  std::vector<NetDeviceInfo> ports{};
  std::string left_out{};  ///< usable ports that are not taken, with reasons; empty: none
};

/// The fastest usable ports of `layer`, in the order of `devices`. A port whose layer or rate is not known is taken. If
/// `layer` is empty, layers are not compared.
PortChoice choose_ports(std::span<const NetDeviceInfo> devices, std::string_view layer);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_PORT_CHOICE_HPP
