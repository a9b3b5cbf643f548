#include "bootstrap/socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "core/descriptors.hpp"
#include "ferry/bootstrap.hpp"

namespace ferry::bootstrap {
namespace {

// Longest backlog that the kernel allows (it clips to net.core.somaxconn), so that unauthenticated connections waiting
// in the backlog do not push out real peers.
constexpr int kListenBacklog = 4096;

// A dead machine is detected after 10 + 3 * 5 s. For idle groups only: calls have deadlines.
constexpr int kKeepaliveIdleSeconds = 10;
constexpr int kKeepaliveIntervalSeconds = 5;
constexpr int kKeepaliveNumProbes = 3;

/// Between two attempts to poll for which the kernel had no memory.
constexpr std::chrono::milliseconds kShortOfMemoryPause{1};

void set_option(int fd, int level, int option, int value) {
  // The result is ignored: the protocol works without every option set here.
  (void)setsockopt(fd, level, option, &value, sizeof value);
}

bool is_loopback(const Address& address) {
  if (address.storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address.storage);
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
  return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) != 0;
}

bool is_numeric(const std::string& host) {
  in6_addr scratch{};
  return inet_pton(AF_INET, host.c_str(), &scratch) == 1 || inet_pton(AF_INET6, host.c_str(), &scratch) == 1;
}

Address any_interface(const Address& like) {
  Address address = like;
  if (address.storage.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address.storage).sin_addr.s_addr = htonl(INADDR_ANY);
  } else {
    reinterpret_cast<sockaddr_in6&>(address.storage).sin6_addr = in6addr_any;
  }
  return address;
}

bool read_ends(int fd, Address* here, Address* there) {
  here->size = there->size = sizeof here->storage;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&here->storage), &here->size) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&there->storage), &there->size) == 0;
}

/// As IPv4: an IPv4 address that a socket for both families reports in IPv6 form.
Address unmapped(const Address& address) {
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
  if (address.storage.ss_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return address;
  Address result;
  auto& v4 = reinterpret_cast<sockaddr_in&>(result.storage);
  v4.sin_family = AF_INET;
  v4.sin_port = v6.sin6_port;
  std::memcpy(&v4.sin_addr, &v6.sin6_addr.s6_addr[sizeof(v6.sin6_addr) - sizeof(v4.sin_addr)], sizeof(v4.sin_addr));
  result.size = sizeof v4;
  return result;
}

/// Numeric host, with the interface if the address needs one: "192.0.2.1", "fe80::1%eth0".
std::string host_of(const Address& address) {
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address.raw(), address.size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text.data();
}

/// Listening socket, or errno.
std::pair<UniqueFd, int> try_listen(const Address& address) {
  UniqueFd fd(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return {UniqueFd(), errno};
  // The port of a job that restarts at once is still in TIME_WAIT.
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(fd.get(), address.raw(), address.size) != 0 || listen(fd.get(), kListenBacklog) != 0) {
    return {UniqueFd(), errno};
  }
  return {std::move(fd), 0};
}

std::string listen_hint(int error) {
  if (is_out_of_descriptors(error)) return describe_descriptor_limit(error, 1);
  switch (error) {
    case EADDRINUSE:
      return "another process listens there (another job, or a second rank 0 of this one); choose another port: "
             "FERRY_PORT sets it, otherwise it follows from MASTER_PORT or the job";
    case EADDRNOTAVAIL:
      return "this is not an address of this machine; give the host that rank 0 runs on";
    case EACCES:
      return "ports below 1024 need privileges; choose a higher port (FERRY_PORT)";
    default:
      return "choose another host or port";
  }
}

}  // namespace

void set_port(Address* address, std::uint16_t port) {
  if (address->storage.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address->storage).sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6&>(address->storage).sin6_port = htons(port);
  }
}

std::string to_string(const Address& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address.storage);
    (void)inet_ntop(AF_INET, &v4.sin_addr, text, sizeof text);
    return fmt::format("{}:{}", text, ntohs(v4.sin_port));
  }
  if (address.storage.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
    (void)inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof text);
    return fmt::format("[{}]:{}", text, ntohs(v6.sin6_port));
  }
  return "unknown address";
}

std::string without_brackets(const std::string& host) {
  const bool in_brackets = host.size() > 2 && host.starts_with('[') && host.ends_with(']');
  return in_brackets ? host.substr(1, host.size() - 2) : host;
}

std::string describe_errno(int error) { return std::generic_category().message(error); }

Result<std::vector<Address>> resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  const int system_error = error == EAI_SYSTEM ? errno : 0;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  if (is_out_of_descriptors(system_error)) {
    return Status(ErrorCode::kSystem, fmt::format("bootstrap: host '{}' cannot be resolved: {}", host,
                                                  describe_descriptor_limit(system_error, 1)));
  }
  if (error == EAI_AGAIN || error == EAI_SYSTEM || error == EAI_MEMORY) {
    return Status(ErrorCode::kTransport,
                  fmt::format("bootstrap: host '{}' cannot be resolved at the moment: {}", host,
                              error == EAI_SYSTEM ? describe_errno(system_error) : gai_strerror(error)));
  }
  std::vector<Address> addresses;
  for (const addrinfo* entry = list; error == 0 && entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    Address address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
    addresses.push_back(address);
  }
  if (addresses.empty()) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("bootstrap: host '{}' has no address: {}; give an address, or a name that every rank can "
                              "resolve, without a port",
                              host, error == 0 ? "no IPv4 or IPv6 entry" : gai_strerror(error)));
  }
  return addresses;
}

Result<UniqueFd> listen_on(const std::string& host, std::span<const std::uint16_t> ports) {
  const bool is_name = !is_numeric(host) && host != "localhost";
  int first_error = 0;
  std::string tried;
  for (const std::uint16_t port : ports) {
    Result<std::vector<Address>> addresses = resolve(host, port);
    if (!addresses.ok()) return addresses.status();
    bool is_taken = false;
    for (const Address& resolved : *addresses) {
      const Address address = is_name && is_loopback(resolved) ? any_interface(resolved) : resolved;
      auto [fd, error] = try_listen(address);
      if (error == 0) return std::move(fd);
      is_taken |= error == EADDRINUSE || error == EACCES;
      // The first failure is reported: a later one is often only an address family that this machine does not have.
      if (first_error == 0) {
        first_error = error;
        tried = to_string(address);
      }
    }
    if (!is_taken) break;
    if (port != ports.front()) tried += fmt::format("{}{}", port == ports[1] ? " nor on port " : ", ", port);
  }
  return Status(ErrorCode::kSystem, fmt::format("bootstrap: rank 0 cannot listen on {} (host '{}'): {}; {}", tried,
                                                host, describe_errno(first_error), listen_hint(first_error)));
}

Status adopt_listener(int fd) {
  int accepts = 0;
  socklen_t size = sizeof accepts;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0 || accepts == 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("create_tcp_bootstrap: listen_fd={} is not a listening socket; bind it and call listen() "
                              "on it, or leave it at -1",
                              fd));
  }
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    return Status(ErrorCode::kSystem, fmt::format("create_tcp_bootstrap: listen_fd={} cannot be made non-blocking: {}",
                                                  fd, describe_errno(errno)));
  }
  return {};
}

void tune_connected(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleSeconds);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalSeconds);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveNumProbes);
}

ConnectionEnds ends_of(int fd) {
  Address here;
  Address there;
  if (!read_ends(fd, &here, &there)) return {};
  return {host_of(unmapped(here)), host_of(unmapped(there)), is_loopback(unmapped(here))};
}

bool is_connected_to_itself(int fd) {
  Address here;
  Address there;
  return read_ends(fd, &here, &there) && to_string(here) == to_string(there);
}

IoOutcome read_some(int fd, std::span<std::byte> into) {
  for (;;) {
    const ssize_t moved = recv(fd, into.data(), into.size(), 0);
    if (moved > 0) return {IoOutcome::Kind::kMoved, static_cast<std::size_t>(moved), 0};
    if (moved == 0) return {IoOutcome::Kind::kClosed, 0, 0};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {IoOutcome::Kind::kWouldBlock, 0, 0};
    return {IoOutcome::Kind::kFailed, 0, errno};
  }
}

IoOutcome write_some(int fd, std::span<const std::byte> from) {
  for (;;) {
    const ssize_t moved = send(fd, from.data(), from.size(), MSG_NOSIGNAL);
    if (moved >= 0) return {IoOutcome::Kind::kMoved, static_cast<std::size_t>(moved), 0};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {IoOutcome::Kind::kWouldBlock, 0, 0};
    return {IoOutcome::Kind::kFailed, 0, errno};
  }
}

Status wait_until_ready(std::span<pollfd> entries, Deadline deadline) {
  for (;;) {
    const std::int64_t left_ns = deadline.remaining_ns();
    const timespec timeout{.tv_sec = left_ns / kNsPerSecond, .tv_nsec = left_ns % kNsPerSecond};
    const int num_ready = ppoll(entries.data(), entries.size(), &timeout, nullptr);
    if (num_ready >= 0) return {};
    if (errno == EINTR) continue;
    if (errno != ENOMEM && errno != EAGAIN) {
      return Status(ErrorCode::kSystem,
                    fmt::format("bootstrap: poll on {} sockets failed: {}", entries.size(), describe_errno(errno)));
    }
    // The kernel is short of memory for the moment. An error in a group's last exchange would reach this rank alone.
    for (pollfd& entry : entries) entry.revents = 0;
    if (left_ns == 0) return {};
    std::this_thread::sleep_for(kShortOfMemoryPause);
  }
}

}  // namespace ferry::bootstrap
