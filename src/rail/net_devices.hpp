#ifndef FERRY_RAIL_NET_DEVICES_HPP
#define FERRY_RAIL_NET_DEVICES_HPP

/// Choice of the network devices through which ranks of other hosts may reach this rank. As few as possible: an engine
/// listens on each of them, and its protocol does not authenticate.

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend_context.hpp"
#include "core/rank_place.hpp"
#include "ferry/transports.hpp"
#include "rail/ring_memory.hpp"

namespace ferry::rail {

/// Variable that names the devices if GroupOptions does not.
inline constexpr const char* kNetDevicesVariable = "FERRY_NET_DEVICES";

struct NetDeviceRequest {
  std::string_view wanted{};            ///< GroupOptions::net_devices
  const char* engine_variable = "";     ///< net::EngineFactory::devices_variable
  std::string bootstrap_address{};      ///< Bootstrap::local_address
  std::span<const RankPlace> places{};  ///< of all ranks
  std::string gpu_pci_address{};        ///< of the rank's GPU; empty: no GPU, or unknown location
  int rail = 0;                         ///< this rank's number in its node
  std::filesystem::path sys{"/sys"};
};

/// RankPlace that this rank publishes. `gpu`: the GPU whose kernels use the network; null: there is none.
RankPlace place_to_publish(const BackendContext& context, const GpuSide* gpu = nullptr);

/// Rates of the ports that a rank may use: `wanted` is GroupOptions::net_devices, `engine_variable` as in the request.
LayerRates rates_to_publish(std::string_view wanted, const char* engine_variable,
                            std::span<const NetDeviceInfo> devices);

/// @errors kInvalidArgument: a named device does not exist or cannot be used
///         kUnsupported: no interface leads to rank 0, or no link layer is common to the ranks' ports
Result<NetDeviceChoice> choose_net_devices(const NetDeviceRequest& request, std::span<const NetDeviceInfo> devices);

}  // namespace ferry::rail

#endif  // FERRY_RAIL_NET_DEVICES_HPP
