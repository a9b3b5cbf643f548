#ifndef FERRY_NET_UCX_PEER_HPP
#define FERRY_NET_UCX_PEER_HPP

/// What the engine knows of another end, and how that begins.

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
  std::unique_ptr<Inbound> inbound;        // likewise
  std::vector<std::byte> address;          // of its worker, and of its receiver
  std::set<SocketName> sockets;            // by which it has connected to this end
  bool reached = false;                    // it has answered what was sent to its worker
  bool receiver_reached = true;            // the same of its receiver; or it has none
  bool greeted = false;                    // it has said hello
  bool uses_receiver = false;              // and that it uses this end's receiver
  bool settled = false;                    // it will not connect again
  bool lost = false;                       // reported to the owner, or not to be reported
  bool leaving = false;                    // it sent a goodbye, and this end's farewell is due or sent
  bool answered = false;                   // the farewell is sent
  bool left = false;                       // it will put nothing more

  /// In each way that there is: until then UCX may still choose between two sockets, one from each end.
  bool is_connected() const {
    return reached && receiver_reached && greeted && (!uses_receiver || inbound->has_come(Way::kReceiver));
  }
  /// Nothing more is to be sent to it. Until then it needs its connections, also those that it has not named.
  bool has_ended() const { return connection->is_shut() || (answered && connection->quiet()); }
};

/// This end, as peers are told of it.
struct OwnEnd {
  const EngineOptions& options;
  const Scopes& scopes;
  const Token& token;
  const KeyPair& keys;
};

/// Begins to connect to the peer of this index, which has published `own_part`. Where that fails after the connection
/// was made, `peer` has it: it must be shut.
/// @errors kTransport: what was published does not fit this end; kSystem; as Connection::open
Status connect_peer(const OwnEnd& own, int idx, std::span<const std::byte> own_part, Peer* peer);

}  // namespace ferry::net::ucx

#endif  // FERRY_NET_UCX_PEER_HPP
