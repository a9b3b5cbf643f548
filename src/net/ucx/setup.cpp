#include "net/ucx/setup.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <set>
#include <system_error>

namespace ferry::net::ucx {
namespace {

constexpr std::string_view kHostTransports = "posix,tcp";
constexpr std::string_view kHostTransportsWithoutFiles = "tcp";
/// All transports except memory of this host, which scope kHost uses.
constexpr std::string_view kNetworkTransports = "^sm,self";
constexpr std::string_view kInfinibandTransports = "ib";
/// With the CUDA transports UCX recognises GPU memory and registers it with the cards.
constexpr std::string_view kInfinibandTransportsWithGpu = "ib,cuda";
/// Names that stand for several transports.
constexpr std::array<std::string_view, 3> kSharedMemoryNames{"shm", "sm", "mm"};
/// Transports whose cards write into memory by themselves, and names that stand for them.
constexpr std::array<std::string_view, 3> kRemoteWriters{"rc", "dc", "ib"};

std::vector<std::string_view> items_of(std::string_view list) {
  std::vector<std::string_view> items;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    if (end > 0) items.push_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return items;
}

bool names_shared_memory(std::string_view item) {
  return std::ranges::find(kSharedMemoryNames, item) != kSharedMemoryNames.end();
}

bool names(std::string_view item, std::string_view transport) {
  if (item == transport || item == "all") return true;
  return names_shared_memory(item) && (transport == "posix" || transport == "sysv");
}

/// Transports that reach GPU memory of this process; they connect no peers.
bool is_for_gpu_memory(std::string_view item) { return item.starts_with("cuda") || item == "gdr_copy"; }

bool is_remote_writer(std::string_view item) {
  return std::ranges::any_of(kRemoteWriters, [item](std::string_view name) { return item.starts_with(name); });
}

/// True if every transport that the list allows writes into memory by itself (or only helps to connect).
bool only_remote_writers(std::string_view transports) {
  const std::vector<std::string_view> items = items_of(transports);
  return std::ranges::any_of(items, is_remote_writer) && std::ranges::all_of(items, [](std::string_view item) {
           return is_remote_writer(item) || item.starts_with("ud") || item == "self" || is_for_gpu_memory(item);
         });
}

/// True if a value of UCX_TLS names cards, or allows those that this host has.
bool may_use_cards(std::string_view transports, bool has_infiniband) {
  const bool named = !transports.starts_with('^') && std::ranges::any_of(items_of(transports), is_remote_writer);
  return named || (has_infiniband && allows(transports, "rc"));
}

/// Visits the interfaces that are up, once for each address. The visit ends when `visit` returns true.
void visit_interfaces(const std::function<bool(const ifaddrs&)>& visit) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if ((one->ifa_flags & IFF_UP) != 0 && visit(*one)) break;
  }
  freeifaddrs(all);
}

std::string loopback_interface() {
  std::string name;
  visit_interfaces([&name](const ifaddrs& one) {
    if ((one.ifa_flags & IFF_LOOPBACK) != 0) name = one.ifa_name;
    return !name.empty();
  });
  return name;
}

bool has_entries(const char* folder) {
  std::error_code error;
  return std::filesystem::directory_iterator(folder, error) != std::filesystem::directory_iterator();
}

/// Null for an empty list, as elsewhere in the choice of devices: UCX would read it as no device at all.
const char* names_devices(const char* list) { return list != nullptr && *list != '\0' ? list : nullptr; }

std::vector<Setup> host_setups(const Surroundings& surroundings) {
  const std::string_view own = surroundings.transports != nullptr ? surroundings.transports : "";
  if (allows(own, "posix") || allows(own, "sysv") || allows(own, "tcp")) {
    return {{.devices = allows(own, "tcp") ? surroundings.loopback : "", .shared_memory = allows(own, "posix")}};
  }
  return {{.transports = std::string(kHostTransports),
           .devices = surroundings.loopback,
           .shared_memory = true,
           .optional = true},
          {.transports = std::string(kHostTransportsWithoutFiles), .devices = surroundings.loopback}};
}

std::vector<Setup> network_setups(std::string_view devices, const Surroundings& surroundings) {
  const std::string allowed = surroundings.devices != nullptr ? "" : std::string(devices);
  if (surroundings.transports != nullptr) {
    return {{.devices = allowed,
             .remote_writes = only_remote_writers(surroundings.transports),
             .has_cards = may_use_cards(surroundings.transports, surroundings.has_infiniband),
             .shared_memory = allows(surroundings.transports, "posix")}};
  }
  std::vector<Setup> setups;
  if (surroundings.has_infiniband) {
    const std::string_view cards = surroundings.gpu_memory ? kInfinibandTransportsWithGpu : kInfinibandTransports;
    setups.push_back({.transports = std::string(cards),
                      .devices = allowed,
                      .remote_writes = true,
                      .has_cards = true,
                      .optional = true});
  }
  setups.push_back({.transports = std::string(kNetworkTransports), .devices = allowed});
  return setups;
}

}  // namespace

Surroundings Surroundings::here() {
  return {.transports = std::getenv("UCX_TLS"),
          .devices = names_devices(std::getenv("UCX_NET_DEVICES")),
          .loopback = loopback_interface(),
          .has_infiniband = has_entries("/sys/class/infiniband")};
}

std::vector<Setup> setups_for(Scope scope, std::string_view devices, const Surroundings& surroundings) {
  return scope == Scope::kHost ? host_setups(surroundings) : network_setups(devices, surroundings);
}

std::size_t num_network_interfaces() {
  std::set<std::string> names;
  visit_interfaces([&names](const ifaddrs& one) {
    if (one.ifa_addr != nullptr && (one.ifa_addr->sa_family == AF_INET || one.ifa_addr->sa_family == AF_INET6)) {
      names.insert(one.ifa_name);
    }
    return false;
  });
  return names.size();
}

bool allows(std::string_view transports, std::string_view name) {
  if (transports.empty()) return false;
  const bool excludes = transports.starts_with('^');
  if (excludes) transports.remove_prefix(1);
  const std::vector<std::string_view> items = items_of(transports);
  return std::ranges::any_of(items, [name](std::string_view item) { return names(item, name); }) != excludes;
}

}  // namespace ferry::net::ucx
