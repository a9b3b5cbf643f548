#ifndef FERRY_BOOTSTRAP_SOCKET_HPP
#define FERRY_BOOTSTRAP_SOCKET_HPP

/// Non-blocking TCP sockets that never raise SIGPIPE.

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

void set_port(Address* address, std::uint16_t port);

/// "10.0.0.1:28000", "[::1]:28000".
std::string to_string(const Address& address);

/// "::1" of "[::1]", the way in which addresses are written before a port; other text unchanged.
std::string without_brackets(const std::string& host);

/// strerror, but thread-safe.
std::string describe_errno(int error);

/// Addresses of `host`. May block as long as the system's resolver does, unless `host` is numeric.
/// @errors kInvalidArgument: there is no such host; kTransport: the resolver has no answer now, try again
Result<std::vector<Address>> resolve(const std::string& host, std::uint16_t port);

/// Socket that listens on `host`, at the first of `ports` that is free. A name other than "localhost" that resolves to
/// a loopback address (as Debian's /etc/hosts does for the machine's own name) listens on all interfaces, because other
/// machines resolve the name to another address.
/// @errors kInvalidArgument, kTransport: see resolve; kSystem: the ports are taken, or the address is not local
Result<UniqueFd> listen_on(const std::string& host, std::span<const std::uint16_t> ports);

/// Make a caller's listening socket non-blocking and close-on-exec.
/// @errors kInvalidArgument: `fd` is not a listening stream socket
Status adopt_listener(int fd);

/// Disables delays of small frames, and enables keep-alive probes that detect a dead machine within half a minute.
void tune_connected(int fd);

/// Numeric addresses of a connection's ends, without ports; empty if it has none. IPv4 addresses in IPv6 form are
/// returned as IPv4.
struct ConnectionEnds {
  std::string local;
  std::string remote;
  bool is_loopback = false;
};
ConnectionEnds ends_of(int fd);

/// True if both ends of a connection are the same socket: connect() to a free local port can do that.
bool is_connected_to_itself(int fd);

/// Outcome of one non-blocking read or write.
struct IoOutcome {
  enum class Kind { kMoved, kWouldBlock, kClosed, kFailed };
  Kind kind = Kind::kMoved;
  std::size_t num_bytes = 0;
  int error = 0;  ///< errno of kFailed
};
IoOutcome read_some(int fd, std::span<std::byte> into);
IoOutcome write_some(int fd, std::span<const std::byte> from);

/// Returns when one of `entries` is ready (see revents), or at the deadline with no revents set.
/// @errors kSystem
Status wait_until_ready(std::span<pollfd> entries, Deadline deadline);

}  // namespace ferry::bootstrap

#endif  // FERRY_BOOTSTRAP_SOCKET_HPP
