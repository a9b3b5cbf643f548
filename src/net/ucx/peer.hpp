#ifndef FERRY_NET_UCX_PEER_HPP
#define FERRY_NET_UCX_PEER_HPP

/// What the engine knows of another end.

#include <cstddef>
#include <memory>
#include <set>
#include <vector>

#include "net/ucx/connection.hpp"
#include "net/ucx/inbound.hpp"
#include "net/ucx/ports.hpp"

namespace ferry::net::ucx {

struct Peer {
  std::unique_ptr<Connection> connection;  // null for this end itself
  std::unique_ptr<Inbound> inbound;        // likewise
  std::vector<std::byte> address;          // of its worker
  std::set<SocketName> sockets;            // by which it has connected to this end
  bool settled = false;                    // it will not connect again
  bool lost = false;                       // reported to the owner, or not to be reported
  bool leaving = false;                    // it sent a goodbye, and this end's farewell is due or sent
  bool answered = false;                   // the farewell is sent
  bool left = false;                       // it will put nothing more
};

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_PEER_HPP
