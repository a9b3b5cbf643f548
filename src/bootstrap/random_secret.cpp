#include "bootstrap/random_secret.hpp"

#include <fmt/format.h>
#include <netinet/in.h>

#include <array>
#include <cerrno>
#include <cstddef>

#include "bootstrap/auth.hpp"
#include "bootstrap/socket.hpp"

namespace ferry::bootstrap {

Result<std::string> make_random_secret() {
  std::array<std::byte, kDigestBytes> random{};
  if (Status status = fill_random(random); !status.ok()) return status;
  std::string secret;
  for (std::byte value : random) secret += fmt::format("{:02x}", std::to_integer<unsigned>(value));
  return secret;
}

Result<int> listen_on_loopback(std::uint16_t* port) {
  Result<UniqueFd> listener = listen_on("127.0.0.1", 0);
  if (!listener.ok()) return listener.status();
  sockaddr_in bound{};
  socklen_t size = sizeof bound;
  if (getsockname(listener->get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return Status(ErrorCode::kSystem, fmt::format("bootstrap: getsockname failed: {}", describe_errno(errno)));
  }
  *port = ntohs(bound.sin_port);
  return listener->release();
}

}  // namespace ferry::bootstrap
