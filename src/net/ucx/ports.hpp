#ifndef FERRY_NET_UCX_PORTS_HPP
#define FERRY_NET_UCX_PORTS_HPP

/// Closes the way in that UCX's TCP transport leaves open. It listens as long as a worker lives, and whoever connects
/// and speaks its protocol can write to any address. So once all peers have connected, the kernel drops whatever comes
/// for the sockets that listen (UCX does not stand their being closed), and this end ends the connections that no peer
/// says are its own: each peer names its sockets in authenticated messages.
///
/// UCX does not give away its sockets; they are found among those of the process, by ports that its address contains.

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

namespace ferry::net::ucx {

/// Stands for an address and a port.
using SocketName = std::uint64_t;

/// A socket of this process that is connected over TCP.
struct ConnectedSocket {
  SocketName local_name = 0;
  std::uint16_t remote_port = 0;
};
std::vector<ConnectedSocket> connected_sockets();

/// Whether a worker's address, as UCX packs it, may contain the port: it does if the worker listens there.
bool may_contain_port(std::span<const std::byte> worker_address, std::uint16_t port);

/// The sockets at which one worker listens.
class Listeners {
 public:
  /// Sockets that listen now. Take it before a worker is made.
  static std::set<int> all_of_process();

  Listeners() = default;
  /// Those that were not there `before`, of a worker with this address.
  Listeners(const std::set<int>& before, std::span<const std::byte> worker_address);

  /// Nobody can connect afterwards: attempts are not answered. What is connected stays so if its other end is one of
  /// these.
  void close(const std::set<SocketName>& known_ends);

 private:
  struct Listener {
    int descriptor = -1;
    std::uint16_t port = 0;
  };
  std::vector<Listener> listeners_;
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_PORTS_HPP
