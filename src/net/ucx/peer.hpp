#ifndef FERRY_NET_UCX_PEER_HPP
#define FERRY_NET_UCX_PEER_HPP

/// State of another end, and how its connection begins.

#include <cstddef>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "net/blob.hpp"
#include "net/engine.hpp"

#include "net/ucx/connection.hpp"
#include "net/ucx/inbound.hpp"
#include "net/ucx/ports.hpp"
#include "net/ucx/scopes.hpp"
#include "net/ucx/seal.hpp"

namespace ferry::net::ucx {

struct Peer {
  std::unique_ptr<Connection> connection;  // null for this end itself
  std::unique_ptr<Inbound> inbound;        // null for this end itself
  std::vector<std::byte> address;          // addresses of its worker and of its receiver
  std::set<SocketName> sockets;            // sockets with which it has connected to this end
  bool reached = false;                    // it has answered the hello to its worker
  bool receiver_reached = true;            // it has answered the hello to its receiver, or has no receiver
  bool greeted = false;                    // its hello has arrived
  bool uses_receiver = false;              // its hello said that it uses this end's receiver
  bool settled = false;                    // it will not connect again
  bool lost = false;                       // reported to the owner, or not to be reported
  bool leaving = false;                    // its goodbye has arrived; this end's farewell is due or sent
  bool answered = false;                   // the farewell is sent
  bool left = false;                       // it will put no more

  /// True if both ends are connected in every way: until then UCX may still choose between two sockets, one from each
  /// end.
  bool is_connected() const {
    return reached && receiver_reached && greeted && (!uses_receiver || inbound->has_come(Way::kReceiver));
  }
  /// True if no more messages are to be sent to it. Until then this end needs its connections, including unnamed ones.
  bool has_ended() const { return connection->is_shut() || (answered && connection->quiet()); }
};

/// This end, as described to its peers.
struct OwnEnd {
  const EngineOptions& options;
  const Scopes& scopes;
  const Token& token;
  const KeyPair& keys;
};

/// Begins to connect to the peer with index `idx`, which has published `own_part`. On failure `peer` may already own
/// the connection, which must then be shut.
/// @errors kTransport: the published part does not fit this end; kSystem; the errors of Connection::open
Status connect_peer(const OwnEnd& own, int idx, std::span<const std::byte> own_part, Peer* peer);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_PEER_HPP
