#ifndef FERRY_BOOTSTRAP_SOCKET_HPP
#define FERRY_BOOTSTRAP_SOCKET_HPP

/// TCP sockets that never block, never raise SIGPIPE and close themselves.

#include <poll.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap/deadline.hpp"
#include "core/unique_fd.hpp"
#include "ferry/status.hpp"

namespace ferry::bootstrap {

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

/// "10.0.0.1:28000", "[::1]:28000".
std::string to_string(const Address& address);

/// strerror, safe among threads.
std::string describe_errno(int error);

/// The addresses `host` stands for. May block as long as the system's resolver does unless `host` is numeric.
/// @errors kInvalidArgument: there is no such host; kTransport: the resolver has no answer now, try again
Result<std::vector<Address>> resolve(const std::string& host, std::uint16_t port);

/// A socket that listens where `host` says. Where a name other than "localhost" resolves to a loopback address (as
/// Debian's /etc/hosts does with the machine's own name), it listens on all interfaces: the peers see another address.
/// @errors kInvalidArgument, kTransport: see resolve; kSystem: the port is taken, or the address is not this machine's
Result<UniqueFd> listen_on(const std::string& host, std::uint16_t port);

/// @errors kInvalidArgument: `fd` is not a listening stream socket
Status adopt_listener(int fd);

/// No delay for small frames; notice within half a minute that a peer's machine is gone.
void tune_connected(int fd);

/// True where a connection's two ends are one socket, which connect() to a free local port can bring about.
bool is_connected_to_itself(int fd);

/// What one non-blocking read or write did.
struct IoOutcome {
  enum class Kind { kMoved, kWouldBlock, kClosed, kFailed };
  Kind kind = Kind::kMoved;
  std::size_t num_bytes = 0;
  int error = 0;  ///< errno of kFailed
};
IoOutcome read_some(int fd, std::span<std::byte> into);
IoOutcome write_some(int fd, std::span<const std::byte> from);

/// Waits until one of `entries` is ready (revents tell) or the deadline has passed (none does).
/// @errors kSystem
Status wait_until_ready(std::span<pollfd> entries, Deadline deadline);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_SOCKET_HPP
