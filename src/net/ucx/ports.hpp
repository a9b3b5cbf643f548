#ifndef FERRY_NET_UCX_PORTS_HPP
#define FERRY_NET_UCX_PORTS_HPP

/// Closes the entry that UCX's TCP transport leaves open. It listens as long as a worker lives, and any process that
/// connects and speaks its protocol can write to any address. So once all peers have connected, the kernel drops
/// packets for the listening sockets (UCX does not tolerate closing them), and this end ends the connections that no
/// peer has claimed: each peer names its sockets in authenticated messages.
///
/// UCX does not expose its sockets; they are found among those of the process by ports that its address contains.

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

namespace ferry::net::ucx {

/// Hash of an address and a port.
using SocketName = std::uint64_t;

/// A socket of this process that is connected over TCP.
struct ConnectedSocket {
  SocketName local_name = 0;
  std::uint16_t remote_port = 0;
};
std::vector<ConnectedSocket> connected_sockets();

/// True if a worker's address, as UCX packs it, may contain the port; it does if the worker listens there.
bool may_contain_port(std::span<const std::byte> worker_address, std::uint16_t port);

/// Sockets on which one worker listens.
class Listeners {
 public:
  /// Sockets that listen now. Call it before a worker is created.
  static std::set<int> all_of_process();

  Listeners() = default;
  /// Takes the sockets of a worker with this address that were not in `before`.
  Listeners(const std::set<int>& before, std::span<const std::byte> worker_address);

  /// Ends listening: later connection attempts are not answered. Connections survive if their other end is in
  /// `known_ends`.
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
