#include "net/ucx/ports.hpp"

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace ferry::net::ucx {
namespace {

/// Descriptors of this process; empty if the system does not list them.
std::vector<int> open_descriptors() {
  std::vector<int> descriptors;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return descriptors;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] != '.') descriptors.push_back(std::atoi(entry->d_name));
  }
  closedir(folder);
  return descriptors;
}

struct Name {
  SocketName hash = 0;
  std::uint16_t port = 0;
};

using NameFunction = int (*)(int, sockaddr*, socklen_t*);

/// Null for a descriptor that is not a socket of an internet protocol, or that has no such name.
std::optional<Name> name_of(int descriptor, NameFunction function) {
  sockaddr_storage address{};
  socklen_t num_bytes = sizeof address;
  if (function(descriptor, reinterpret_cast<sockaddr*>(&address), &num_bytes) != 0) return std::nullopt;
  std::array<std::uint8_t, sizeof(in6_addr) + sizeof(in_port_t)> bytes{};
  in_port_t port = 0;
  if (address.ss_family == AF_INET) {
    const auto& name = reinterpret_cast<const sockaddr_in&>(address);
    port = name.sin_port;
    // IPv4 address mapped into IPv6.
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(&bytes[12], &name.sin_addr, sizeof name.sin_addr);
  } else if (address.ss_family == AF_INET6) {
    const auto& name = reinterpret_cast<const sockaddr_in6&>(address);
    port = name.sin6_port;
    std::memcpy(bytes.data(), &name.sin6_addr, sizeof name.sin6_addr);
  } else {
    return std::nullopt;
  }
  std::memcpy(&bytes[sizeof(in6_addr)], &port, sizeof port);
  Name name{.hash = 0xcbf29ce484222325, .port = ntohs(port)};  // FNV-1a, 64 bits
  for (const std::uint8_t byte : bytes) name.hash = (name.hash ^ byte) * 0x100000001b3;
  return name;
}

bool listens(int descriptor) {
  int answer = 0;
  socklen_t num_bytes = sizeof answer;
  return getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &answer, &num_bytes) == 0 && answer != 0;
}

/// Makes the kernel drop all packets for the socket; connections that it has accepted are not affected.
void drop_packets(int descriptor) {
  sock_filter drop_all = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{.len = 1, .filter = &drop_all};
  (void)setsockopt(descriptor, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);
}

}  // namespace

std::vector<ConnectedSocket> connected_sockets() {
  std::vector<ConnectedSocket> sockets;
  for (const int descriptor : open_descriptors()) {
    const std::optional<Name> remote = name_of(descriptor, getpeername);
    const std::optional<Name> local = remote ? name_of(descriptor, getsockname) : std::nullopt;
    if (local) sockets.push_back({local->hash, remote->port});
  }
  return sockets;
}

bool may_contain_port(std::span<const std::byte> worker_address, std::uint16_t port) {
  const std::array<std::byte, 2> in_network_order{static_cast<std::byte>(port >> 8),
                                                  static_cast<std::byte>(port & 0xff)};
  return std::search(worker_address.begin(), worker_address.end(), in_network_order.begin(), in_network_order.end()) !=
         worker_address.end();
}

std::set<int> Listeners::all_of_process() {
  std::set<int> listening;
  for (const int descriptor : open_descriptors()) {
    if (listens(descriptor)) listening.insert(descriptor);
  }
  return listening;
}

Listeners::Listeners(const std::set<int>& before, std::span<const std::byte> worker_address) {
  for (const int descriptor : all_of_process()) {
    const std::optional<Name> name = name_of(descriptor, getsockname);
    if (before.contains(descriptor) || !name || !may_contain_port(worker_address, name->port)) continue;
    listeners_.push_back({descriptor, name->port});
  }
}

void Listeners::close(const std::set<SocketName>& known_ends) {
  const auto is_ours = [this](const Name& local) {
    return std::ranges::any_of(listeners_, [&](const Listener& one) { return one.port == local.port; });
  };
  for (const Listener& listener : listeners_) {
    const std::optional<Name> name = name_of(listener.descriptor, getsockname);
    if (name && name->port == listener.port && listens(listener.descriptor)) drop_packets(listener.descriptor);
  }
  // A socket accepted from a listener has the listener's port.
  for (const int descriptor : open_descriptors()) {
    const std::optional<Name> remote = name_of(descriptor, getpeername);
    const std::optional<Name> local = remote ? name_of(descriptor, getsockname) : std::nullopt;
    if (local && is_ours(*local) && !known_ends.contains(remote->hash)) shutdown(descriptor, SHUT_RDWR);
  }
  listeners_.clear();
}

}  // namespace ferry::net::ucx
