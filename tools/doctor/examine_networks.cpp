#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "doctor/finding.hpp"
#include "ferry/bootstrap.hpp"
#include "ferry/transports.hpp"

namespace ferry::tools {

namespace {

/// Version and path of the library, and whether it works with GPU memory.
std::string describe_library(const TransportInfo& transport) {
  for (const GpuDirectFact& fact : gpu_direct_facts(transport.name)) {
    if (fact.name == "network library") return fact.observed;
  }
  return transport.library;
}

std::string describe_port(const NetDeviceInfo& port) {
  if (!port.usable) return fmt::format("{} (port not active)", port.name);
  return fmt::format("{} ({}, {})", port.name, port.link_layer.empty() ? "link layer not known" : port.link_layer,
                     port.rate_gbps == 0 ? "rate not known" : fmt::format("{} Gb/s", port.rate_gbps));
}

std::string describe(const NetDeviceInfo& device) {
  if (device.rdma) return describe_port(device);
  if (device.addresses.empty()) return fmt::format("{} (no address)", device.name);
  return fmt::format("{} ({}{})", device.name, fmt::join(device.addresses, ", "), device.usable ? "" : ", down");
}

/// Numeric address of rank 0's host from the launcher's variables; empty without a launcher or if the name has no
/// address.
std::string address_of_rank_0() {
  if (launcher_variables_from_environment().empty()) return "";
  const auto options = tcp_bootstrap_options_from_environment();
  if (!options) return "";
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(options->host.c_str(), nullptr, &hints, &list) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  std::array<char, NI_MAXHOST> text{};
  const int error = getnameinfo(list->ai_addr, list->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

std::vector<Finding> examine_net_devices() {
  Finding devices{Health::kOk, "net devices", "", ""};
  for (const NetDeviceInfo& device : net_devices()) {
    devices.observed += (devices.observed.empty() ? "" : "; ") + describe(device);
  }
  if (devices.observed.empty()) {
    devices = {Health::kMissing, "net devices", "none", "ranks cannot be on several hosts"};
  }
  const auto choice = choose_net_devices("", address_of_rank_0());
  if (!choice) {
    return {devices,
            {Health::kWarn, "net choice", std::string(choice.status().message()),
             "ranks of one host need no device; for several hosts set FERRY_NET_DEVICES"}};
  }
  return {devices,
          {Health::kOk, "net choice",
           fmt::format("between hosts ranks listen on {} only ({}), among ranks of this host on loopback only",
                       choice->devices, choice->reason),
           ""}};
}

}  // namespace

std::vector<Finding> examine_networks() {
  std::vector<Finding> findings;
  for (const TransportInfo& transport : transports()) {
    Finding finding{transport.available ? Health::kOk : Health::kMissing, fmt::format("net {}", transport.name),
                    transport.description, transport.reason};
    if (!transport.library.empty()) finding.observed += fmt::format("; {}", describe_library(transport));
    findings.push_back(std::move(finding));
  }
  for (Finding& finding : examine_net_devices()) findings.push_back(std::move(finding));
  return findings;
}

std::vector<Finding> examine_ring_memory(int device, const std::string& pci_address) {
  std::vector<Finding> findings(1);
  const std::vector<std::string> ports = nearest_net_devices(pci_address);
  std::string missing = ports.empty() ? fmt::format("no RDMA card is near GPU {}", device) : "";
  for (const GpuDirectFact& fact : gpu_direct_facts("auto", device)) {
    if (!fact.present && (missing.empty() || fact.name == "card")) missing = fact.observed;
    findings.push_back(
        {fact.present ? Health::kOk : Health::kMissing, "gpudirect " + fact.name, fact.observed, fact.advice});
  }
  findings.front() = {
      Health::kOk, "ring memory",
      missing.empty()
          ? fmt::format("GPU ranks of several hosts try their rings in GPU memory, for {}", fmt::join(ports, ", "))
          : fmt::format("GPU ranks of several nodes have their rings in pinned host memory: {}", missing),
      ""};
  return findings;
}

}  // namespace ferry::tools
