#include "rail/net_devices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "net/devices.hpp"
#include "net/engine.hpp"
#include "net/nearest.hpp"
#include "rail/port_choice.hpp"

namespace ferry::rail {
namespace {

bool is_of_network(const std::string& address) { return !address.empty() && !net::is_loopback_address(address); }

/// Treats an unset variable like an empty one.
std::string variable(const char* name) {
  const char* value = *name == '\0' ? nullptr : std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

/// Devices that the user names, and who names them; empty: none.
NetDeviceChoice named_devices(std::string_view wanted, const char* engine_variable) {
  if (std::string list = variable(engine_variable); !list.empty()) return {std::move(list), engine_variable};
  if (!wanted.empty()) return {std::string(wanted), "GroupOptions::net_devices"};
  return {variable(kNetDevicesVariable), kNetDevicesVariable};
}

Result<NetDeviceChoice> take_named(const std::string& list, std::string_view source,
                                   std::span<const NetDeviceInfo> devices) {
  Result<std::string> names = net::check_devices(list, devices);
  if (!names.ok()) {
    return Status(names.status().code(), fmt::format("{} is {}", source, names.status().message()));
  }
  return NetDeviceChoice{std::move(*names), std::string(source)};
}

/// Searches for the interface that has the first matching address, and the reason for the choice.
class Search {
 public:
  explicit Search(std::span<const NetDeviceInfo> devices) : devices_(devices) {}

  void try_address(const std::string& address, std::string_view reason) {
    if (found_.devices.empty()) found_ = {net::interface_of(address, devices_), fmt::format("{} {}", address, reason)};
  }
  const NetDeviceChoice& found() const { return found_; }

 private:
  std::span<const NetDeviceInfo> devices_;
  NetDeviceChoice found_;
};

NetDeviceChoice interface_towards_rank_0(const NetDeviceRequest& request, std::span<const NetDeviceInfo> devices) {
  if (std::ranges::all_of(request.places, &RankPlace::in_this_network)) {
    const auto loopback = std::ranges::find_if(devices, &NetDeviceInfo::loopback);
    if (loopback != devices.end()) return {loopback->name, "all ranks share the interfaces of this host"};
  }
  const RankPlace& root = request.places.front();
  Search search(devices);
  if (is_of_network(request.bootstrap_address)) {
    search.try_address(request.bootstrap_address, "is the bootstrap's address here");
  }
  if (root.in_this_network) search.try_address(root.address, "is where rank 0 is reached");
  search.try_address(net::source_towards(root.address), "leads to rank 0");
  search.try_address(net::default_address(devices), "is on the default route");
  return search.found();
}

/// Adds ports of network cards: an engine opens no socket on them, and without them a group would not use the card. A
/// rank with a GPU takes one port: among equally near ones the one at its own number, so that the ranks of a node use
/// different ports, and rail peers, which have the same number, use the same port if their hosts are alike.
void add_ports(const NetDeviceRequest& request, std::span<const NetDeviceInfo> devices, std::string_view layer,
               NetDeviceChoice* choice) {
  const PortChoice ports = choose_ports(devices, layer);
  const std::vector<std::string> nearest = net::nearest_ports(request.gpu_pci_address, ports.ports, request.sys);
  if (!nearest.empty()) {
    const std::string& port = nearest[static_cast<std::size_t>(request.rail) % nearest.size()];
    choice->devices = fmt::format("{},{}", port, choice->devices);
    choice->reason += fmt::format("; {} is {} to the GPU at {}", port,
                                  nearest.size() == 1 ? "nearest" : fmt::format("one of {} nearest", nearest.size()),
                                  request.gpu_pci_address);
  } else {
    std::string names;
    for (const NetDeviceInfo& port : ports.ports) names += port.name + ",";
    choice->devices.insert(0, names);
  }
  if (!ports.left_out.empty()) choice->reason += "; " + ports.left_out;
}

}  // namespace

RankPlace place_to_publish(const BackendContext& context, const GpuSide* gpu) {
  const std::vector<NetDeviceInfo> devices = net_devices();
  std::string address = context.bootstrap->local_address();
  if (!is_of_network(address)) address = net::default_address(devices);
  const char* const engine_variable = net::engine_factories().front().devices_variable;
  RankPlace place{.address = std::move(address),
                  .rates = rates_to_publish(context.options.net_devices, engine_variable, devices)};
  if (gpu != nullptr && context.options.ring_memory == "auto") {
    const std::string named = named_devices(context.options.net_devices, engine_variable).devices;
    place.ring_proposal = propose_gpu_rings(*gpu, context.options.transport, named, devices);
  }
  return place;
}

LayerRates rates_to_publish(std::string_view wanted, const char* engine_variable,
                            std::span<const NetDeviceInfo> devices) {
  const std::string list = named_devices(wanted, engine_variable).devices;
  if (list.empty()) return layer_rates(devices);
  // A wrong name is reported when devices are chosen.
  const std::vector<NetDeviceInfo> named = net::devices_named(list, devices);
  return layer_rates(named);
}

Result<NetDeviceChoice> choose_net_devices(const NetDeviceRequest& request, std::span<const NetDeviceInfo> devices) {
  if (NetDeviceChoice named = named_devices(request.wanted, request.engine_variable); !named.devices.empty()) {
    // Not checked: the engine's library has its own rules for its variable.
    if (named.reason == request.engine_variable) return named;
    return take_named(named.devices, named.reason, devices);
  }
  NetDeviceChoice choice = interface_towards_rank_0(request, devices);
  if (choice.devices.empty()) {
    return Status(ErrorCode::kUnsupported,
                  fmt::format("no network interface is known to lead to the other ranks' hosts; name one in "
                              "GroupOptions::net_devices or {}; this host has {}",
                              kNetDevicesVariable, net::describe(devices)));
  }
  const Result<std::string> layer = common_layer(request.places);
  if (!layer.ok()) return layer.status();
  add_ports(request, devices, *layer, &choice);
  return choice;
}

}  // namespace ferry::rail

namespace ferry {

Result<NetDeviceChoice> choose_net_devices(const std::string& wanted, const std::string& rank_0) {
  const std::vector<NetDeviceInfo> devices = net_devices();
  const std::string address = rail::is_of_network(rank_0) ? rank_0 : std::string();
  const bool is_here = !net::interface_of(address, devices).empty();
  const std::vector<RankPlace> places{{.in_this_network = is_here, .address = address},
                                      {.rates = rail::layer_rates(devices)}};
  const net::EngineFactory& engine = net::engine_factories().front();
  const rail::NetDeviceRequest request{
      .wanted = wanted, .engine_variable = engine.devices_variable, .bootstrap_address = {}, .places = places};
  return rail::choose_net_devices(request, devices);
}

std::vector<std::string> nearest_net_devices(const std::string& pci_address) {
  const std::vector<NetDeviceInfo> devices = net_devices();
  const std::vector<RankPlace> here{{.rates = rail::layer_rates(devices)}};
  return net::nearest_ports(pci_address, rail::choose_ports(devices, rail::common_layer(here).value()).ports);
}

}  // namespace ferry
