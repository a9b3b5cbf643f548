#include "rail/ring_memory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "net/devices.hpp"
#include "net/engine.hpp"
#include "net/gpu_direct.hpp"
#include "net/nearest.hpp"
#include "rail/port_choice.hpp"

namespace ferry::rail {
namespace {

/// Null: there is none of this name.
const net::EngineFactory* factory_of(const std::string& transport) {
  for (const net::EngineFactory& factory : net::engine_factories()) {
    // "auto" uses the best engine, which is the first.
    if (transport == "auto" || transport == factory.name) return &factory;
  }
  return nullptr;
}

GpuDirectFact engine_fact(const std::string& transport) {
  const net::EngineFactory* const factory = factory_of(transport);
  if (factory == nullptr) {
    return {"network library", false, fmt::format("no transport \"{}\"", transport), "use transport \"ucx\""};
  }
  if (factory->gpu_memory != nullptr) return factory->gpu_memory();
  return {"network library", false, fmt::format("transport \"{}\" copies by processors", factory->name),
          "use transport \"ucx\""};
}

/// Usable ports of the cards that a rank may use.
std::vector<NetDeviceInfo> ports_to_use(std::string_view named, std::span<const NetDeviceInfo> devices) {
  if (named.empty()) {
    const std::vector<RankPlace> here{{.rates = layer_rates(devices)}};
    return choose_ports(devices, common_layer(here).value()).ports;
  }
  std::vector<NetDeviceInfo> ports = net::devices_named(named, devices);
  std::erase_if(ports, [](const NetDeviceInfo& device) { return !device.rdma; });
  return ports;
}

std::string_view reason_of(RingProposal said) {
  switch (said) {
    case RingProposal::kNotAsked:
    case RingProposal::kProposed:
      return "";
    case RingProposal::kNoTransport:
      return "uses a network without cards";
    case RingProposal::kNoCard:
      return "has no RDMA card with an active port";
    case RingProposal::kFarCard:
      return "has no RDMA card near its GPU";
    case RingProposal::kNoGpu:
      return "has a GPU whose memory cards cannot reach";
    case RingProposal::kNoDriver:
      return "has neither the module nvidia_peermem nor dma-buf";
    case RingProposal::kNoLibrary:
      return "has a network library that works with host memory only";
  }
  return "is of another build";
}

}  // namespace

std::vector<GpuDirectFact> gpu_direct_facts(const GpuPart& gpu, const std::string& transport) {
  return {gpu.registration, net::driver_fact(gpu.has_dma_buf), net::card_fact(net_devices()), engine_fact(transport)};
}

Status check_ring_memory(std::string_view wanted, const std::vector<GpuDirectFact>& facts) {
  if (wanted != "gpu") return {};
  std::string missing;
  for (const GpuDirectFact& fact : facts) {
    if (fact.present) continue;
    missing += fmt::format("{}{}: {} ({})", missing.empty() ? "" : "; ", fact.name, fact.observed, fact.advice);
  }
  if (missing.empty()) return {};
  return Status(
      ErrorCode::kUnsupported,
      fmt::format("Group::create: GroupOptions::ring_memory is \"gpu\", and rings cannot be in GPU memory here: {}",
                  missing));
}

RingProposal propose_gpu_rings(const GpuSide& gpu, const std::string& transport, std::string_view named,
                               std::span<const NetDeviceInfo> devices, const std::filesystem::path& sys) {
  const net::EngineFactory* const factory = factory_of(transport);
  if (factory == nullptr || factory->gpu_memory == nullptr) return RingProposal::kNoTransport;
  const std::vector<NetDeviceInfo> ports = ports_to_use(named, devices);
  if (ports.empty()) return RingProposal::kNoCard;
  if (net::nearest_ports(gpu.pci_address, ports, sys).empty()) return RingProposal::kFarCard;
  const GpuPart part = gpu.examine();
  if (!part.registration.present) return RingProposal::kNoGpu;
  if (!net::driver_fact(part.has_dma_buf).present) return RingProposal::kNoDriver;
  return factory->gpu_memory().present ? RingProposal::kProposed : RingProposal::kNoLibrary;
}

std::string why_host_memory(std::span<const RankPlace> places) {
  const auto other = std::ranges::find_if(
      places, [](const RankPlace& place) { return place.ring_proposal != RingProposal::kProposed; });
  if (other != places.end()) return fmt::format("rank {} {}", other - places.begin(), reason_of(other->ring_proposal));
  return std::ranges::all_of(places, &RankPlace::on_this_host) ? "all ranks share a host" : "";
}

}  // namespace ferry::rail
