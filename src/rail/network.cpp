#include "rail/network.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/choose.hpp"
#include "core/cores.hpp"
#include "core/create_together.hpp"
#include "core/log.hpp"
#include "net/devices.hpp"
#include "plan/to_size.hpp"

namespace ferry::rail {
namespace {

/// The loopback network does not leave the process, so it is used only on request.
bool leaves_the_process(const net::EngineFactory& factory) { return factory.name != "loopback"; }

/// Threads of a rank: its own, the one that drives the engine, and a receiver.
constexpr int kThreadsWithReceiver = 3;

bool has_cores_for_receivers(std::span<const RankPlace> places) {
  const auto num_threads = kThreadsWithReceiver * std::ranges::count_if(places, &RankPlace::on_this_host);
  return cores_suffice_for(static_cast<int>(num_threads));
}

/// Message of a rank about its engine: the version, a zero, and the address.
std::vector<std::byte> to_message(std::string_view version, const net::Blob& address) {
  const auto text = std::as_bytes(std::span(version));
  std::vector<std::byte> message(text.begin(), text.end());
  message.push_back(std::byte{0});
  message.insert(message.end(), address.begin(), address.end());
  return message;
}

std::string_view version_in(std::span<const std::byte> message) {
  const auto end = std::ranges::find(message, std::byte{0});
  return {reinterpret_cast<const char*>(message.data()), static_cast<std::size_t>(end - message.begin())};
}

net::Blob address_in(std::span<const std::byte> message) {
  const std::size_t begin = std::min(version_in(message).size() + 1, message.size());
  return {message.begin() + static_cast<std::ptrdiff_t>(begin), message.end()};
}

/// Checks that the version is the same on every rank.
Status check_versions(const std::vector<std::vector<std::byte>>& messages) {
  std::vector<std::string_view> versions;
  for (const std::vector<std::byte>& message : messages) versions.push_back(version_in(message));
  return check_engine_versions(versions);
}

/// Prefixes the name of the call, which an engine does not know.
Status while_creating(const Status& status) {
  if (status.ok()) return status;
  return Status(status.code(), fmt::format("Group::create: {}", status.message()), status.peer());
}

/// Chooses the devices, and sets in the engine's options which peers are on this host and need no device.
Status choose_devices(const BackendContext& context, const NetworkParams& params, const net::EngineFactory& factory,
                      Network* network) {
  net::EngineOptions* engine_options = &network->options;
  if (*factory.devices_variable == '\0') return {};
  bool leaves_this_host = false;
  for (const int rank : engine_options->ranks) {
    const bool is_here = params.places[to_size(rank)].on_this_host;
    engine_options->on_this_host.push_back(is_here);
    leaves_this_host = leaves_this_host || !is_here;
  }
  const NetDeviceRequest request{.wanted = context.options.net_devices,
                                 .engine_variable = factory.devices_variable,
                                 .bootstrap_address = context.bootstrap->local_address(),
                                 .places = params.places,
                                 .gpu_pci_address = params.gpu_pci_address,
                                 .rail = context.topology.rail_of(context.topology.rank)};
  // Choose even if no device is needed: a wrong name is an error everywhere.
  Result<NetDeviceChoice> chosen = choose_net_devices(request, ferry::net_devices());
  if (!leaves_this_host && chosen.status().code() != ErrorCode::kInvalidArgument) {
    network->devices.reason = "to ranks of this host only";
    return {};
  }
  if (!chosen.ok()) return while_creating(chosen.status());
  network->devices = std::move(*chosen);
  engine_options->net_devices = network->devices.devices;
  return {};
}

Result<std::vector<std::vector<std::byte>>> gather_addresses(const BackendContext& context, const NetworkParams& params,
                                                             const Status& my_status, std::span<const std::byte> mine) {
  const std::int64_t timeout_ns = context.options.timeout_ns;
  if (params.failed_attempt == nullptr) return gather_or_fail(*context.bootstrap, my_status, mine, timeout_ns);
  Result<Attempt> attempt = gather_attempt(*context.bootstrap, my_status, mine, timeout_ns);
  if (!attempt.ok()) return attempt.status();
  *params.failed_attempt = attempt->failure;
  if (!attempt->failure.ok()) return attempt->failure;
  return std::move(attempt->messages);
}

/// "mlx5_0:1 InfiniBand 400 Gb/s, eth0": the devices with their layers and rates as far as the system lists them.
std::string describe_rates(const std::string& list) {
  std::string text;
  for (const NetDeviceInfo& device : net::devices_named(list, ferry::net_devices())) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", device.name);
    if (!device.link_layer.empty()) text += fmt::format(" {}", device.link_layer);
    if (device.rate_gbps > 0) text += fmt::format(" {} Gb/s", device.rate_gbps);
  }
  return text;
}

void log_network(const Topology& topology, const net::EngineFactory& factory, const Network& network) {
  if (!logs(LogLevel::kInfo)) return;
  log_line(LogLevel::kInfo, {topology.rank, topology.num_ranks},
           "create: engine={} library=\"{}\" devices=\"{}\" reason=\"{}\" rates=\"{}\" receiver={}",
           network.engine_name, factory.library != nullptr ? factory.library() : std::string("none"),
           network.devices.devices, network.devices.reason, describe_rates(network.devices.devices),
           network.options.may_start_receiver);
}

}  // namespace

Status check_engine_versions(std::span<const std::string_view> versions) {
  const auto other = std::ranges::find_if(versions, [&](std::string_view one) { return one != versions.front(); });
  if (other == versions.end()) return {};
  const auto rank = other - versions.begin();
  return Status(ErrorCode::kUnsupported,
                fmt::format("Group::create: rank 0 has {} and rank {} has {}; install the same version on all hosts "
                            "(FERRY_UCX_LIBRARY names another one that a host has; `ferry doctor` shows which is used)",
                            versions.front(), rank, *other),
                static_cast<int>(rank));
}

Status reserve_threads(const Topology& topology, net::ReservedThreads* threads) {
  return topology.num_nodes() > 1 ? while_creating(threads->reserve(net::kMaxThreads)) : Status();
}

std::string Network::describe() const {
  if (devices.reason.empty()) return engine_name;
  if (devices.devices.empty()) return fmt::format("{} ({})", engine_name, devices.reason);
  return fmt::format("{} through {} ({})", engine_name, devices.devices, devices.reason);
}

Result<Network> open_network(const BackendContext& context, const NetworkParams& params, const Status& my_status) {
  // A rank that fails reports it in the gather below, so that all ranks fail together.
  Status status = my_status;
  Network network;
  network.options = params.engine;
  network.options.cards = {context.options.network_service_level, context.options.network_paths};
  network.options.may_start_receiver = has_cores_for_receivers(params.places);
  net::Blob address;
  if (status.ok()) {
    const Result<const net::EngineFactory*> factory = choose_factory(
        "Group::create: transport", context.options.transport, net::engine_factories(), leaves_the_process);
    status = factory.status();
    if (status.ok()) {
      network.engine_name = (*factory)->name;
      status = choose_devices(context, params, **factory, &network);
    }
    if (status.ok()) {
      Result<std::unique_ptr<net::Engine>> created = (*factory)->create(network.options);
      status = while_creating(created.status());
      if (created.ok()) {
        network.engine = std::move(*created);
        network.cards = network.engine->card_settings();
        log_network(context.topology, **factory, network);
      }
    }
  }
  if (status.ok()) {
    Result<net::Blob> mine = network.engine->address();
    status = while_creating(mine.status());
    if (mine.ok()) address = std::move(*mine);
  }
  const std::string_view version = network.engine != nullptr ? network.engine->version() : std::string_view();
  Result<std::vector<std::vector<std::byte>>> all =
      gather_addresses(context, params, status, to_message(version, address));
  if (!all.ok() && network.engine != nullptr) network.engine->limit_close_time(0);  // no peer connects
  if (!all.ok()) return all.status();
  if (Status versions = check_versions(*all); !versions.ok()) return versions;
  for (const int rank : params.engine.ranks) network.addresses.push_back(address_in((*all)[to_size(rank)]));
  return network;
}

}  // namespace ferry::rail
