#include "net/devices.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <memory>
#include <system_error>

#include "net/sysfs.hpp"

namespace ferry::net {
namespace {

/// Addresses that no host has (RFC 5737, RFC 3849): only the default route leads to them.
constexpr std::array<const char*, 2> kUnroutableAddresses{"198.51.100.1", "2001:db8::1"};
/// Any port will do, because connecting a datagram socket only looks up the route (9: discard, RFC 863).
constexpr const char* kAnyPort = "9";
/// Linux (include/rdma/ib_verbs.h): IB_PORT_ACTIVE, as /sys/class/infiniband/*/ports/*/state shows it.
constexpr std::string_view kActivePort = "4:";

std::string text_of(const sockaddr* address) {
  const socklen_t num_bytes = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, num_bytes, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text.data();
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Queries no name server. Null if the text is not an address.
AddressList parse(const std::string& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (address.empty() || getaddrinfo(address.c_str(), kAnyPort, &hints, &list) != 0) list = nullptr;
  return {list, &freeaddrinfo};
}

std::vector<NetDeviceInfo> interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, &freeifaddrs);
  std::vector<NetDeviceInfo> devices;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    // An additional IPv4 address may have a label such as "eth0:1". Interface names contain no colon.
    std::string name(entry->ifa_name);
    name.resize(std::min(name.find(':'), name.size()));
    auto device = std::ranges::find(devices, name, &NetDeviceInfo::name);
    if (device == devices.end()) {
      devices.push_back({.name = name, .loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0});
      device = devices.end() - 1;
    }
    const bool has_address =
        entry->ifa_addr != nullptr && (entry->ifa_addr->sa_family == AF_INET || entry->ifa_addr->sa_family == AF_INET6);
    if (!has_address) continue;
    device->addresses.push_back(text_of(entry->ifa_addr));
    device->usable = (entry->ifa_flags & IFF_UP) != 0;
  }
  return devices;
}

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> entries;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    entries.push_back(entry->path());
  }
  std::ranges::sort(entries);
  return entries;
}

std::string trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n";
  const std::size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return std::string(text.substr(first, text.find_last_not_of(kBlanks) - first + 1));
}

std::vector<std::string> split(std::string_view list) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    names.push_back(trimmed(list.substr(begin, end - begin)));
    begin = end + 1;
  }
  return names;
}

/// Link layer of a port; empty if it is none of the known ones.
std::string link_layer_in(const std::filesystem::path& port) {
  const std::string text = trimmed(first_line(port / "link_layer"));
  return text == kInfiniBand || text == kEthernet ? text : std::string();
}

/// Whole Gb/s of a rate such as "400 Gb/sec (4X NDR)"; 0: not known.
int rate_in(const std::filesystem::path& port) {
  constexpr int kMaxRate = 1'000'000;  // so that the rates of a host have a sum
  const std::string text = first_line(port / "rate");
  int rate = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), rate);
  return read.ec == std::errc() && text.find("Gb/sec") != std::string::npos ? std::clamp(rate, 0, kMaxRate) : 0;
}

bool is_or_belongs_to(const NetDeviceInfo& device, std::string_view name) {
  return device.name == name || (device.rdma && device.name.substr(0, device.name.rfind(':')) == name);
}

}  // namespace

std::vector<NetDeviceInfo> rdma_ports(const std::filesystem::path& root) {
  std::vector<NetDeviceInfo> devices;
  for (const std::filesystem::path& card : entries_of(root)) {
    for (const std::filesystem::path& port : entries_of(card / "ports")) {
      devices.push_back({.name = fmt::format("{}:{}", card.filename().string(), port.filename().string()),
                         .rdma = true,
                         .usable = first_line(port / "state").starts_with(kActivePort),
                         .link_layer = link_layer_in(port),
                         .rate_gbps = rate_in(port)});
    }
  }
  return devices;
}

std::string interface_of(std::string_view address, std::span<const NetDeviceInfo> devices) {
  for (const NetDeviceInfo& device : devices) {
    if (std::ranges::find(device.addresses, address) != device.addresses.end()) return device.name;
  }
  return {};
}

std::string source_towards(const std::string& address) {
  const AddressList target = parse(address);
  if (target == nullptr) return {};
  const int fd = socket(target->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return {};
  sockaddr_storage source{};
  socklen_t num_bytes = sizeof source;
  const bool found = connect(fd, target->ai_addr, target->ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&source), &num_bytes) == 0;
  close(fd);
  return found ? text_of(reinterpret_cast<const sockaddr*>(&source)) : std::string();
}

std::string default_address(std::span<const NetDeviceInfo> devices) {
  for (const char* address : kUnroutableAddresses) {
    std::string source = source_towards(address);
    if (!source.empty() && !is_loopback_address(source)) return source;
  }
  const auto first = std::ranges::find_if(
      devices, [](const NetDeviceInfo& device) { return device.usable && !device.loopback && !device.rdma; });
  return first == devices.end() ? std::string() : first->addresses.front();
}

bool is_loopback_address(const std::string& address) {
  const AddressList parsed = parse(address);
  if (parsed == nullptr) return false;
  if (parsed->ai_family == AF_INET) {
    constexpr int kNetworkShift = 24;
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(parsed->ai_addr);
    return ntohl(v4->sin_addr.s_addr) >> kNetworkShift == IN_LOOPBACKNET;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(parsed->ai_addr)->sin6_addr) != 0;
}

std::string describe(std::span<const NetDeviceInfo> devices) {
  std::string text;
  for (const NetDeviceInfo& device : devices) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", device.name);
    if (!device.usable) {
      text += device.rdma ? " (port not active)" : device.addresses.empty() ? " (no address)" : " (down)";
    } else if (!device.rdma) {
      text += fmt::format(" ({})", device.addresses.front());
    }
  }
  return text.empty() ? "none" : text;
}

std::vector<NetDeviceInfo> devices_named(std::string_view list, std::span<const NetDeviceInfo> devices) {
  const std::vector<std::string> names = split(list);
  std::vector<NetDeviceInfo> named;
  std::ranges::copy_if(devices, std::back_inserter(named), [&](const NetDeviceInfo& device) {
    return device.usable && (trimmed(list) == "all" || std::ranges::any_of(names, [&](const std::string& name) {
                               return is_or_belongs_to(device, name);
                             }));
  });
  return named;
}

Result<std::string> check_devices(std::string_view list, std::span<const NetDeviceInfo> devices) {
  if (trimmed(list) == "all") return std::string("all");
  std::vector<std::string> chosen;
  for (const std::string& name : split(list)) {
    const std::size_t num_before = chosen.size();
    for (const NetDeviceInfo& device : devices) {
      if (device.usable && is_or_belongs_to(device, name)) chosen.push_back(device.name);
    }
    if (chosen.size() > num_before) continue;
    const bool exists =
        std::ranges::any_of(devices, [&](const NetDeviceInfo& device) { return is_or_belongs_to(device, name); });
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("\"{}\": {} \"{}\"; expected names separated by commas, or \"all\"; this host has {}",
                              list, exists ? "cannot use" : "no network device is called", name, describe(devices)));
  }
  return fmt::format("{}", fmt::join(chosen, ","));
}

}  // namespace ferry::net

namespace ferry {

std::vector<NetDeviceInfo> net_devices() {
  std::vector<NetDeviceInfo> devices = net::interfaces();
  for (NetDeviceInfo& port : net::rdma_ports()) devices.push_back(std::move(port));
  return devices;
}

}  // namespace ferry
