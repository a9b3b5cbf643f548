#ifndef FERRY_TESTS_LOOPBACK_LISTENER_HPP
#define FERRY_TESTS_LOOPBACK_LISTENER_HPP

/// What a parent that forks its own ranks puts into their TcpBootstrapOptions.

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "bootstrap/handshake.hpp"
#include "bootstrap/socket.hpp"
#include "core/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry::test {

/// 32 random bytes in hexadecimal.
inline Result<std::string> make_random_secret() {
  std::array<std::byte, bootstrap::kDigestBytes> random{};
  if (Status status = bootstrap::fill_random(random); !status.ok()) return status;
  std::string secret;
  for (std::byte value : random) secret += fmt::format("{:02x}", std::to_integer<unsigned>(value));
  return secret;
}

/// A socket that listens on 127.0.0.1 and a free port, written to `port`: the listen_fd of rank 0. The parent and the
/// other ranks close their copies, so that the port is free again when rank 0 dies.
inline Result<int> listen_on_loopback(std::uint16_t* port) {
  Result<UniqueFd> listener = bootstrap::listen_on("127.0.0.1", 0);
  if (!listener.ok()) return listener.status();
  sockaddr_in bound{};
  socklen_t size = sizeof bound;
  if (getsockname(listener->get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return Status(ErrorCode::kSystem, fmt::format("getsockname failed: {}", bootstrap::describe_errno(errno)));
  }
  *port = ntohs(bound.sin_port);
  return listener->release();
}

}  // namespace ferry::test

#endif  // FERRY_TESTS_LOOPBACK_LISTENER_HPP
